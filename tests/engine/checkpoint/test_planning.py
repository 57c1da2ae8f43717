"""The planner's answer beside every other choice, its budgets, and values set by hand."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from engine.burst import METHOD
from engine.checkpoint.planning.cost import (
    CONTENTION,
    CostModel,
    GpuSpeeds,
    copied_gradients,
    copied_moments,
    gradient_seconds,
    update_seconds,
)
from engine.checkpoint.planning.memory import GIB, MemoryModel, memory_of
from engine.checkpoint.planning.memory_settings import (
    BESIDE_CHECKPOINT,
    PLANNABLE,
    MemorySettings,
    left_open,
    memory_settings_of,
    open_names,
)
from engine.checkpoint.planning.plan import (
    Budget,
    PlanningProblem,
    SearchGrid,
    cheapest,
    leanest,
    least_gpu_bytes,
    planned,
    without_effect,
)
from engine.lora import Lora
from engine.method import method_unsupported_reason
from engine.settings import BUFFERS, PIECE_ELEMENTS, Checkpoint, TrialSettings, hosted_fraction
from engine.shape import ModelShape
from tests.slow import slow

B1 = ModelShape(name="1b", layers=16, hidden=2048, ffn=8192, heads=16, kv_heads=8, head_dim=128, vocab=32000)
SMALL_GRID = SearchGrid(
    tail=(1.0, 0.5, 0.0), mlp=(1.0, 0.3, 0.0), mlp_tiles=(1, 4), projection_tiles=(1, 4), every=(1, 2),
    optimizer_offload=(False, 0.1, 0.6, True), head_tiles=(0, 16), head_groups=(1, 4),
)  # fmt: skip


def settings(
    shape: ModelShape = B1, seq_len: int = 1 << 16, given: tuple[str, ...] = (), **changes: Any
) -> TrialSettings:
    own = {key: changes.pop(key) for key in ("tail", "every", "offload", "host_layers") if key in changes}
    checkpoint = Checkpoint(plan="auto", **own)
    trial = TrialSettings(task="train", method="burst", model=shape, seq_len=seq_len, checkpoint=checkpoint, **changes)
    return left_open(trial, given)


def problem(
    trial: TrialSettings,
    gpu: float,
    speeds: GpuSpeeds | None = None,
    grid: SearchGrid | None = None,
    host: float = float("inf"),
) -> PlanningProblem:
    budget = Budget(gpu=gpu, host=host)
    return PlanningProblem(
        memory=MemoryModel(trial),
        cost=CostModel(trial, speeds or GpuSpeeds()),
        share=lambda memory: budget.share(memory, 1.0),
        start=memory_settings_of(trial),
        open_names=open_names(trial) - without_effect(trial, on_gpu=True),
        layers=trial.model.layers,
        grid=grid or SearchGrid(),
    )


def every_choice(given: PlanningProblem) -> list[MemorySettings]:
    """All of them, also those that say the same in two ways."""
    names = ("tail", "mlp", "offload", "replay", "every", *BESIDE_CHECKPOINT)
    by_hand = given.start.checkpoint.every == 0 and "checkpoint.every" not in given.open_names
    whole = [0] if by_hand else range(given.layers + 1)
    if "checkpoint.whole_layers" not in given.open_names:
        whole = [given.start.checkpoint.whole_layers]
    choices = (
        MemorySettings(
            checkpoint=Checkpoint(
                every=every, tail=tail, mlp=mlp, offload=offload, replay=replay, whole_layers=layers, host_layers=hosted
            ),
            **dict(zip(BESIDE_CHECKPOINT, beside, strict=True)),
        )
        for tail, mlp, offload, replay, every, *beside in itertools.product(
            *(getattr(given.compared, name) for name in names)
        )
        for layers in whole
        for hosted in range(given.layers)
    )
    return [
        choice
        for choice in choices
        if given.compares(choice)
        and (not choice.checkpoint.host_layers or not choice.checkpoint.layers_again(given.layers))
    ]


SHAPES = [
    ModelShape(name="narrow", layers=3, hidden=256, ffn=1024, heads=4, kv_heads=2, head_dim=64, vocab=1000),
    ModelShape(
        name="normed", layers=4, hidden=512, ffn=1024, heads=4, kv_heads=4, head_dim=128, vocab=8000, qk_norm=True
    ),
    ModelShape(name="plain", layers=2, hidden=512, ffn=2048, heads=8, kv_heads=1, head_dim=64, vocab=500, gated=False),
]
HYBRIDS = [  # kinds of layers in turn: with attention or linear, without an MLP
    ModelShape(
        name=f"hybrid_{pattern}", layers=layers, hidden=256, ffn=1024, heads=4, kv_heads=2, head_dim=64, vocab=1000,
        layer_pattern=pattern, linear=linear, linear_heads=8, linear_key_heads=4, linear_key_dim=64,
        linear_value_dim=64,
    )
    for pattern, layers, linear in (("llfff", 5, "gated_delta_net"), ("fl", 4, "mamba2"), ("lLfF", 4, "mamba2"))
]  # fmt: skip
GIVEN: list[tuple[str, ...]] = [
    (), (), ("checkpoint.tail",), ("checkpoint.every",), ("mlp_tiles", "optimizer_offload"),
    ("checkpoint.whole_layers", "head_tiles"), ("checkpoint.offload", "checkpoint.replay", "checkpoint.mlp"),
]  # fmt: skip


# 32: where the MLP is one tile, a part of its products takes less memory than none. 48: with all layers whole, nothing
# is copied to the host. 67: a kept tail costs more on the host than attention again. 211: with all layers whole,
# nothing takes kept outputs. 356: with fewer whole layers a longer group hides the copy of its input. From 300 on:
# models of several kinds of layers.
@pytest.mark.parametrize(
    "seed", [*range(7), 32, 48, 67, 211, 300, 301, 302, 356, *slow(*range(7, 21), *range(303, 312))]
)
def test_no_choice_that_fits_is_cheaper_than_the_planners(seed: int) -> None:
    chance = random.Random(seed)
    ranks = chance.choice([1, 4])
    trial = settings(
        (SHAPES if seed < 300 else HYBRIDS)[seed % 3],
        chance.choice([1 << 11, 1 << 14, 1 << 17]),
        GIVEN[seed % len(GIVEN)],
        mask=chance.choice(["causal", "full", "sliding_window:500"]),
        gradient_accumulation=chance.choice([1, 2]),
        world_size=ranks,
        cp_size=chance.choice([1, ranks]),
        optimizer_states="8bit" if seed in (1, 4, 6) else None,
        offload="all" if seed % 7 == 6 else "none",
    )
    speeds = GpuSpeeds(
        gemm=chance.choice([1e12, 500e12]),
        attention=chance.choice([5e11, 400e12]),
        host_link=chance.choice([1e9, 40e9]),
    )
    open_ended = problem(trial, float("inf"), speeds, SMALL_GRID)
    choices = every_choice(open_ended)
    reserved = [open_ended.memory.of(choice).reserved for choice in choices]
    hosts = [open_ended.memory.host(choice) for choice in choices]
    bytes_of = problem(trial, 1.0, speeds, SMALL_GRID)
    needed = [bytes_of.share(bytes_of.memory.of(choice)) for choice in (leanest(bytes_of), *choices)]
    assert needed[0] == pytest.approx(min(needed), rel=1e-12)
    for part, of_host in ((0.02, 2.0), (0.2, 2.0), (0.5, 2.0), (0.8, 2.0), (1.02, 2.0), (0.2, 0.1), (0.5, 0.3)):
        gpu, host = (least + some * (most - least) for some, least, most in (
            (part, min(reserved), max(reserved)), (of_host, min(hosts), max(hosts)),
        ))  # fmt: skip
        given = problem(trial, gpu, speeds, SMALL_GRID, host)
        fitting = [choice for choice in choices if given.share(given.memory.of(choice)) <= 1]
        found = cheapest(given)
        if not fitting:
            assert found is None
            continue
        assert found is not None
        assert given.share(given.memory.of(found)) <= 1
        assert given.cost.seconds(found) == pytest.approx(min(map(given.cost.seconds, fitting)), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("number", [2, 99])
@pytest.mark.parametrize("seq_len", [1 << 14, 1 << 17])
def test_layers_on_the_host_by_hand_are_planned_beside_as_the_best_of_all_choices_with_whole_layers(
    number: int, seq_len: int
) -> None:
    shape = dataclasses.replace(B1, layers=6, vocab=8000)
    trial = settings(shape, seq_len, ("checkpoint.host_layers",), host_layers=number)
    given = problem(trial, float("inf"), grid=SMALL_GRID)
    kept = itertools.product(given.compared.mlp, *(getattr(given.compared, name) for name in BESIDE_CHECKPOINT))
    choices = [
        MemorySettings(
            checkpoint=Checkpoint(every=0, mlp=mlp, host_layers=number),
            **dict(zip(BESIDE_CHECKPOINT, beside, strict=True)),
        )
        for mlp, *beside in kept
    ]
    shares = sorted(given.memory.of(choice).reserved for choice in choices)
    for part in (0.02, 0.3, 0.6, 1.02):
        given = problem(trial, shares[0] + part * (shares[-1] - shares[0]), grid=SMALL_GRID)
        found = cheapest(given)
        fitting = [choice for choice in choices if given.share(given.memory.of(choice)) <= 1]
        assert (found is None) == (not fitting)
        if found is not None:
            assert found.checkpoint.host_layers == number
            assert given.cost.seconds(found) == pytest.approx(min(map(given.cost.seconds, fitting)), rel=1e-12)


def test_a_part_of_the_moments_goes_to_the_host_where_a_part_is_enough() -> None:
    halves = SearchGrid(optimizer_offload=(False, True))
    for shape, tokens, gib in ((B1, 1 << 14, 18), (B1, 1 << 17, 24), (B1, 1 << 17, 20)):
        trial = settings(shape, tokens, ("head_groups", "checkpoint.host_layers"))
        _, before = planned(trial, Budget(gpu=gib * GIB), grid=halves)
        chosen, found = planned(trial, Budget(gpu=gib * GIB))
        assert 0 < chosen.optimizer_offload < 1
        assert f"{chosen.optimizer_offload:.0%} of the moments on the host" in found.words
        assert found.added_seconds < before.added_seconds
        assert found.host_bytes < before.host_bytes
        assert 0.9 * gib * GIB < found.allocated_bytes < gib * GIB / 1.04
        assert memory_of(chosen).reserved == pytest.approx(found.reserved_bytes, abs=1)


def test_copies_back_are_waited_for_where_heads_go_in_groups() -> None:
    trial = settings()
    state_bytes = 2 * trial.seq_len * 2048
    copied = 16 * (2 * state_bytes + 4 * trial.seq_len * 16)  # input, output and LSE of every layer

    def added(link: float, groups: int) -> float:
        cost = CostModel(trial, dataclasses.replace(GpuSpeeds(), host_link=link))
        there, back = (
            cost.repeated(MemorySettings(checkpoint=Checkpoint(offload=offload), head_groups=groups))
            for offload in ("none", "all")
        )
        return back - there

    for link, ways in ((50 * GIB, 1.0), (0.01 * GIB, 2.0)):  # the first hides copies otherwise, the second few of them
        found = added(link, 8) - (added(link, 1) if ways == 1 else 0.0)
        assert found == pytest.approx(ways * copied / link, rel=0.02)


def test_moments_in_8_bits_leave_room_and_pass_to_the_host_in_less_than_a_third_of_the_time() -> None:
    wide, narrow = (settings(seq_len=1 << 12, optimizer_states=states) for states in (None, "8bit"))
    (_, before), (_, found) = (planned(trial, Budget(gpu=14 * GIB)) for trial in (wide, narrow))
    assert "; moments in 8 bits" in found.words
    assert "in 8 bits" not in before.words
    assert found.added_seconds < 0.9 * before.added_seconds
    assert 0.25 < copied_moments(narrow) / copied_moments(wide) < 0.3  # with the embedding in fp32


def test_copies_of_moments_cost_what_the_forward_does_not_hide() -> None:
    long, short = settings(seq_len=1 << 17), settings(seq_len=1 << 10)
    first = (B1.vocab * B1.hidden + 2 * B1.layer_parameters) / B1.parameters
    half, hides = hosted_fraction(long, 0.5), (B1.layers - 1) / B1.layers  # all are done before the last layer
    for trial in (long, short):
        moments, forward = (1.0, 2.0) if trial is long else (1.0, 0.25)
        hidden = min(forward * hides, half)
        assert update_seconds(trial, 0.0, moments, forward) == 0
        assert update_seconds(trial, 0.5, moments, forward) == pytest.approx(half - hidden + 2 * CONTENTION * hidden)
        beside = min(forward * hides, 1 - first)  # embedding and two layers come before the first one computes
        assert update_seconds(trial, 1.0, moments, forward) == pytest.approx(1 - beside + 2 * CONTENTION * beside)
    narrow = settings(seq_len=1 << 17, optimizer_states="8bit")
    assert update_seconds(narrow, 0.5, 1.0, 2.0) == half


def test_gradients_in_host_memory_leave_those_of_two_layers_on_the_gpu_and_come_back_with_the_moments() -> None:
    trial = dataclasses.replace(settings(seq_len=1 << 13), checkpoint=Checkpoint(), optimizer_offload=True)
    with_gradients = dataclasses.replace(trial, gradient_offload=True)
    before, after = (MemoryModel(each).by_moment(memory_settings_of(each)) for each in (trial, with_gradients))
    all_of_them, layer = 4 * B1.parameters, 4 * B1.layer_parameters
    in_buffers = 4 * BUFFERS * PIECE_ELEMENTS
    assert before["optimizer"] - after["optimizer"] == pytest.approx(all_of_them - in_buffers)
    first = "backward of the first layer"
    later = 4 * (B1.vocab * B1.hidden + B1.hidden) + (B1.layers - 1) * layer
    assert before[first] - after[first] == pytest.approx(later - 2 * layer)
    assert memory_of(with_gradients).host - memory_of(trial).host == pytest.approx(all_of_them)
    assert copied_gradients(trial) == 0.5 * copied_moments(trial)
    # Of each layer's copy what the next one's backward does not hide, and 4% of what it does.
    assert gradient_seconds(trial, True, 0.0, 1.0) == 0
    assert gradient_seconds(with_gradients, True, 16.0, 1.5) == pytest.approx(2 * CONTENTION * 16)
    assert gradient_seconds(with_gradients, True, 32.0, 1.5) == pytest.approx(8 + 2 * CONTENTION * 24)
    part = dataclasses.replace(with_gradients, optimizer_offload=0.5)
    assert memory_of(with_gradients).allocated < memory_of(part).allocated


def test_gradients_on_the_host_take_moments_along_and_stay_out_of_plans_that_cannot_have_them() -> None:
    by_hand = settings(given=("gradient_offload",), gradient_offload=True)
    assert planned(by_hand, Budget(gpu=139 * GIB))[0].optimizer_offload
    chosen = planned(settings(seq_len=1 << 17), Budget(gpu=16 * GIB))[0]
    assert chosen.gradient_offload
    for other in ({"gradient_accumulation": 2}, {"cp_size": 2, "world_size": 2}):
        again = planned(dataclasses.replace(chosen, **other), Budget(gpu=139 * GIB))[0]
        assert not again.gradient_offload
    on_two = settings(given=("gradient_offload",), gradient_offload=True, cp_size=2, world_size=2)
    assert planned(on_two, Budget(gpu=139 * GIB))[0].gradient_offload
    told = "something fits with gradient_offload true"  # as what is predicted is corrected
    two = settings(seq_len=1 << 17, cp_size=2, world_size=2)
    assert told in planned(two, Budget(gpu=9 * GIB))[1].words
    assert told not in planned(two, Budget(gpu=9 * GIB), correction=1.2)[1].words
    on_cpu = planned(by_hand, Budget(gpu=None))[0]  # where nothing else moves what is host memory anyway
    assert on_cpu.gradient_offload
    assert on_cpu.optimizer_offload


def test_updates_hold_buffers_as_large_as_the_parameters_fill() -> None:
    def buffers(trial: TrialSettings) -> float:
        hosted = MemoryModel(trial).by_moment(memory_settings_of(trial))["optimizer"]
        always = 4 * trial.trained_parameters + 2 * B1.parameters * (trial.lora is not None)
        always += 4 * trial.seq_len * B1.head_dim  # RoPE's tables
        return hosted - always - 4 * trial.trained_parameters  # gradients

    trial = dataclasses.replace(settings(seq_len=1 << 13), checkpoint=Checkpoint(), optimizer_offload=True)
    assert buffers(trial) == pytest.approx(8 * BUFFERS * PIECE_ELEMENTS)
    narrow = dataclasses.replace(trial, lora=Lora(rank=16, alpha=32, targets=("q", "v")))
    assert buffers(narrow) == pytest.approx(8 * BUFFERS * 16 * B1.ffn)  # no adapter is larger


def test_layers_and_moments_in_host_memory_share_the_link_of_a_forward() -> None:
    trial = settings(seq_len=1 << 17)
    of = Checkpoint(every=0, host_layers=14)
    cost = CostModel(trial, GpuSpeeds(host_link=33e9))
    alone, beside = (MemorySettings(checkpoint=of, optimizer_offload=part) for part in (False, True))
    without = MemorySettings(checkpoint=Checkpoint(every=0), optimizer_offload=True)
    together = cost.seconds(beside) - cost.seconds(alone)
    assert together > 1.5 * cost.seconds(without)
    assert cost.seconds(beside) > cost.bound(beside) == cost.apart().seconds(beside)


def test_moments_on_the_host_cost_the_copies_of_gathering_where_one_rank_would_keep_its_parameters_whole() -> None:
    for ranks, more in ((1, 34 * B1.parameters / 3e12), (4, 0.0)):
        cost = CostModel(settings(world_size=ranks, cp_size=ranks), GpuSpeeds())
        parts = False, 0.25, 0.5
        whole, some, half = (
            cost.fixed(MemorySettings(checkpoint=Checkpoint(), optimizer_offload=part)) for part in parts
        )
        _, first, second = (hosted_fraction(settings(), part) for part in parts)
        assert some - whole - (half - some) * first / (second - first) == pytest.approx(more, abs=1e-9)


def test_a_budget_nothing_fits_in_gives_the_smallest_choice_and_says_so() -> None:
    chosen, forecast = planned(settings(), Budget(gpu=5 * GIB, source="memory"))
    assert not forecast.fits
    assert forecast.words.startswith("nothing fits: ")
    assert "of 5 GiB (memory)" in forecast.words
    bare = dataclasses.replace(
        settings(),
        checkpoint=Checkpoint(tail=0, offload="all"),
        mlp_tiles=8,
        projection_tiles=8,
        optimizer_offload=True,
    )
    assert memory_of(chosen).reserved <= memory_of(bare).reserved


def test_nothing_fits_less_than_the_least_bytes() -> None:
    for trial in (settings(), settings(seq_len=1 << 19, cp_size=4, world_size=4)):
        least = least_gpu_bytes(trial)
        assert [planned(trial, Budget(gpu=part * least))[1].fits for part in (1 + 1e-9, 1 - 1e-9)] == [True, False]


def test_everything_is_kept_where_it_fits_and_less_and_less_where_it_does_not() -> None:
    trial, added = settings(), []
    for gib in (139, 60, 40, 24):
        chosen, forecast = planned(trial, Budget(gpu=gib * GIB))
        assert forecast.fits
        assert max(forecast.reserved_bytes, 1.04 * forecast.allocated_bytes) <= gib * GIB
        assert memory_of(chosen).reserved == pytest.approx(forecast.reserved_bytes, abs=1)
        added.append(forecast.added_seconds)
    assert planned(trial, Budget(gpu=139 * GIB))[0].checkpoint.every == 0
    assert added[0] == 0
    assert added == sorted(added)
    assert len(set(added)) == 4


def test_more_memory_never_costs_time() -> None:
    added = [planned(settings(seq_len=1 << 17), Budget(gpu=gib * GIB))[1].added_seconds for gib in range(24, 140, 12)]
    assert added == sorted(added, reverse=True)


def test_values_set_by_hand_stay() -> None:
    trial = settings(given=("checkpoint.tail", "mlp_tiles"), tail=0.3, mlp_tiles=3)
    chosen, _ = planned(trial, Budget(gpu=24 * GIB))
    assert (chosen.checkpoint.tail, chosen.mlp_tiles) == (0.3, 3)
    assert chosen.checkpoint.plan == "auto"
    assert chosen.planned.split() == [name for name in PLANNABLE if name not in ("checkpoint.tail", "mlp_tiles")]
    grouped, _ = planned(settings(given=("checkpoint.every",), every=4), Budget(gpu=139 * GIB))
    assert (grouped.checkpoint.every, grouped.checkpoint.whole_layers) == (4, 16)


def test_the_planner_takes_no_more_groups_than_there_are_heads() -> None:
    for kv_heads in (8, 4):
        trial = settings(dataclasses.replace(B1, kv_heads=kv_heads), 1 << 18)
        chosen, _ = planned(trial, Budget(gpu=1.02 * least_gpu_bytes(trial)))
        assert chosen.head_groups == kv_heads
        assert method_unsupported_reason(METHOD, chosen) is None


def test_a_correction_leaves_room_and_is_named() -> None:
    trial, budget = settings(), Budget(gpu=60 * GIB)
    free, corrected = planned(trial, budget), planned(trial, budget, correction=1.2, correction_source="trial x")
    assert 1.2 * corrected[1].reserved_bytes <= 60 * GIB < 1.2 * free[1].reserved_bytes
    assert corrected[1].words.endswith("the prediction is taken 1.2 times (trial x)")


LARGE_HEAD = ModelShape(
    name="large_head", layers=8, hidden=1024, ffn=2048, heads=8, kv_heads=8, head_dim=128, vocab=256000
)


def test_the_head_goes_in_more_tiles_where_its_logits_are_what_does_not_fit() -> None:
    trial = settings(LARGE_HEAD, 1 << 13)
    for given, tiles in ((trial, 0), (dataclasses.replace(trial, lm_head_fusion=False), 0)):
        assert planned(given, Budget(gpu=139 * GIB))[0].head_tiles == tiles
    free = planned(trial, Budget(gpu=139 * GIB))[1]
    tight = Budget(gpu=0.9 * free.reserved_bytes)
    chosen, forecast = planned(trial, tight)
    assert forecast.fits
    assert chosen.head_tiles > 0
    assert f"LM head in {chosen.head_tiles} tiles" in forecast.words
    stays, slower = planned(settings(LARGE_HEAD, 1 << 13, ("head_tiles",)), tight)
    assert stays.head_tiles == 0
    assert slower.added_seconds > forecast.added_seconds


def test_the_host_is_a_budget_too() -> None:
    plenty, some, little = (
        planned(settings(seq_len=1 << 18), Budget(gpu=24 * GIB, host=host * GIB))[0] for host in (500, 64, 4)
    )
    assert plenty.checkpoint.host_layers
    assert plenty.gradient_offload
    assert some.checkpoint.offload == "all"
    assert little.checkpoint.offload == "none"
    assert not little.checkpoint.host_layers


def test_the_words_of_a_plan_say_how_much_of_the_host_it_takes_and_who_set_the_bound() -> None:
    budget = Budget(gpu=24 * GIB, host=60 * GIB, source="memory", host_source="host_memory")
    chosen, found = planned(settings(seq_len=1 << 17), budget)
    assert chosen.checkpoint.host_layers
    assert (
        f" of 24 GiB (memory), and {found.host_bytes / GIB:.3g} of 60 GiB of the host (host_memory); adds"
        in found.words
    )
    alone, found = planned(settings(seq_len=1 << 14), Budget(gpu=139 * GIB, host=60 * GIB))
    assert not alone.checkpoint.host_layers
    assert "of the host" not in found.words


def test_on_a_cpu_nothing_is_offloaded_and_the_host_is_the_budget() -> None:
    for host in (200, 50, 30):
        chosen, forecast = planned(settings(dtype="fp32"), Budget(gpu=None, host=host * GIB))
        assert chosen.checkpoint.offload == "none"
        assert not chosen.optimizer_offload
        assert forecast.reserved_bytes <= host * GIB or not forecast.fits


def test_a_name_that_the_planner_does_not_choose_is_refused() -> None:
    with pytest.raises(ValueError, match="planned names seq_len, which the planner does not choose"):
        open_names(dataclasses.replace(settings(), planned="checkpoint.tail seq_len"))


@pytest.mark.parametrize("shape", [B1, *SHAPES, *HYBRIDS], ids=lambda shape: shape.name)
def test_memory_at_the_head_is_never_more_than_all_and_grows_with_whole_layers(shape: ModelShape) -> None:
    chance = random.Random(0)
    for seq_len, ranks in ((1 << 11, 1), (1 << 17, 1), (1 << 17, 4)):
        given = problem(settings(shape, seq_len, world_size=ranks, cp_size=ranks), 1.0, grid=SMALL_GRID)
        grid = given.compared
        for frame in chance.sample(list(given.frames()), 40):
            heads = [
                given.memory.at_head(given.with_kept(frame, whole, min(grid.tail), grid.mlp[-1]))
                for whole in given.whole_layers(frame)
            ]
            for part in ("allocated", "reserved", "host"):
                found = [getattr(head, part) for head in heads]
                assert found == sorted(found)
            for whole, head in zip(given.whole_layers(frame), heads, strict=True):
                choice = given.with_kept(frame, whole, chance.choice(grid.tail), chance.choice(grid.mlp))
                most = given.memory.of(choice, least=True)
                assert head.allocated <= most.allocated
                assert head.reserved <= most.reserved
                assert head.host <= most.host


@pytest.mark.parametrize("gib", [24, 40, 80, 139])
@pytest.mark.parametrize("seq_len", [1 << 14, 1 << 16, 1 << 18])
def test_a_plan_compares_few_of_all_choices(seq_len: int, gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a plan, counted: a call of the memory model takes microseconds."""
    calls = 0
    counted = MemoryModel.of

    def of(self: MemoryModel, *given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return counted(self, *given, **named)

    monkeypatch.setattr(MemoryModel, "of", of)
    planned(settings(seq_len=seq_len), Budget(gpu=gib * GIB))
    assert 0 < calls < 25_000


def test_a_rank_on_a_cpu_receives_into_ordinary_memory_whatever_the_exchange() -> None:
    for changes in ({"mlp_tiles": 8, "projection_tiles": 8}, {"mlp_tiles": 8, "schedule": "ulysses"}, {}):
        two = [
            memory_of(settings(seq_len=1 << 18, cp_size=2, world_size=2, exchange=exchange, **changes), on_gpu=False)
            for exchange in ("auto", "relay")
        ]
        assert two[0].without_gpu == two[1].without_gpu


def test_on_gpus_receive_slots_are_held_beside_everything_else() -> None:
    trial = settings(seq_len=1 << 18, cp_size=2, world_size=2)
    copied, relayed = (
        MemoryModel(each).by_moment(memory_settings_of(each))
        for each in (trial, dataclasses.replace(trial, exchange="relay"))
    )
    for moment in ("LM head", "optimizer"):
        assert copied[moment] - relayed[moment] == pytest.approx(2.5 * GIB)  # five times K and V of a chunk
