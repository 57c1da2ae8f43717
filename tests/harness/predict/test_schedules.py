"""The cost model beside measured schedules: what is fitted, what is held out, and what `auto` would take."""

from __future__ import annotations

import collections
import csv
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine import ContextParallel
from engine.attention.comm import communicators
from engine.attention.comm.communicators import Communicators
from engine.attention.cost import HardwareModel
from engine.attention.kernels import flex
from engine.attention.masks import parse_mask
from engine.attention.resolve import Resolved, resolve_trial
from engine.burst import METHOD
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from harness.base.errors import UsageError
from harness.metrics.hardware import hardware_named, speeds_of
from harness.predict.attention import attention_problem, layer_attention
from harness.predict.schedules import (
    CHOICES,
    CONSTANTS,
    ERRORS,
    GUESSES,
    PAGE,
    TABLE_FILE,
    MeasuredCall,
    comparison_table,
    comparisons,
    constant_table,
    error_table,
    estimated,
    fitted_model,
    measured_calls,
    median_error,
    table_rows,
)
from harness.predict.validation import marks


@pytest.fixture(scope="module")
def calls() -> list[MeasuredCall]:
    return measured_calls()


def causal(calls: list[MeasuredCall]) -> list[MeasuredCall]:
    return [call for call in calls if call.problem.mask == "causal"]


def test_a_problem_is_on_one_side_and_both_sides_have_every_group_size_and_head_count(calls):
    split = [call for call in causal(calls) if call.side != "another host"]
    groups = {(call.problem.cp_size, call.problem.kv_heads) for call in split}
    assert {cp_size for cp_size, _ in groups} >= {1, 2, 4}
    for group in groups:
        problems = {call.problem for call in split if (call.problem.cp_size, call.problem.kv_heads) == group}
        lengths = {side: sorted(each.seq_len for each in problems if each.side == side) for side in ("fit", "held out")}
        assert len(lengths["fit"]) >= 2, group
        assert len(lengths["held out"]) >= 2, group
    assert all(call.problem.side == "held out" for call in calls if call.problem.mask != "causal")


def test_the_constants_of_the_cost_model_are_what_the_fit_gives(calls: list[MeasuredCall]) -> None:
    found, used = fitted_model(calls), HardwareModel()
    for name in GUESSES:
        assert getattr(found, name) == pytest.approx(getattr(used, name), rel=0.005), name


def test_held_out_calls_change_no_constant(calls: list[MeasuredCall]) -> None:
    def twice_as_slow(call: MeasuredCall) -> MeasuredCall:
        return replace(call, rounds=[[2 * seconds for seconds in steps] for steps in call.rounds])

    changed = [call if call.side == "fit" else twice_as_slow(call) for call in calls]
    assert fitted_model(changed) == fitted_model(calls)
    all_changed = [twice_as_slow(call) for call in calls]
    assert fitted_model(all_changed) != fitted_model(calls)


def test_the_fit_finds_the_constants_that_calls_were_made_with_and_one_bad_call_moves_them_little(calls):
    made_with = replace(HardwareModel(), forward_tflops=500.0, backward_tflops=480.0, together_share=0.05)
    exact = [replace(call, rounds=[[estimated(call, made_with)]]) for call in causal(calls)]
    names = ("forward_tflops", "backward_tflops", "together_share")
    for bad_call in (1.0, 3.0):
        first = next(call for call in exact if call.side == "fit" and call.problem.cp_size == 1)
        given = [replace(call, rounds=[[bad_call * call.seconds]]) if call is first else call for call in exact]
        found = fitted_model(given)
        assert median_error(given, found) < 0.01
        # The two directions are told apart by nothing but their sum.
        assert 1 / found.forward_tflops + 2.5 / found.backward_tflops == pytest.approx(
            1 / 500.0 + 2.5 / 480.0, rel=0.01
        )
    assert set(names) <= GUESSES.keys()


def test_a_constant_on_which_no_call_depends_stays_at_its_guess(calls: list[MeasuredCall]) -> None:
    one_gpu = [call for call in calls if call.problem.cp_size == 1]
    found = fitted_model(one_gpu)
    for name in ("ring_step_seconds", "head_chunk_seconds", "step_tail"):
        assert getattr(found, name) == GUESSES[name]


def test_held_out_calls_are_estimated_within_the_aims(calls: list[MeasuredCall]) -> None:
    held_out = [call for call in causal(calls) if call.side == "held out" and call.problem.cp_size > 1]
    assert len(held_out) >= 14
    assert median_error(held_out, HardwareModel()) < 0.02
    # Half of the few held-out calls on two GPUs are of 16K tokens, where the host is nearly as slow as the GPUs.
    for cp_size, aim in ((2, 0.05), (4, 0.02)):
        of_size = [call for call in held_out if call.problem.cp_size == cp_size]
        assert {call.schedule for call in of_size} == {"ring", "ulysses"}
        assert median_error(of_size, HardwareModel()) < aim, cp_size


def test_auto_takes_the_fastest_schedule_of_held_out_problems_or_one_within_the_spread_of_its_steps(calls):
    found = comparisons(calls, HardwareModel())
    held_out = [choice for choice in found if choice.side == "held out"]
    for cp_size in (2, 4):
        assert sum(choice.problem.cp_size == cp_size for choice in held_out) >= 2, cp_size
    assert [choice for choice in held_out if not choice.within_noise] == []
    # Not because one schedule were always the best.
    assert {choice.best.schedule for choice in found} == {choice.schedule for choice in found} == {"ring", "ulysses"}


def test_calls_of_another_host_are_estimated_and_chosen_as_well_as_those_of_the_fit(calls: list[MeasuredCall]) -> None:
    elsewhere = [call for call in calls if call.side == "another host"]
    long = [call for call in elsewhere if call.problem.cp_size > 1 and call.problem.seq_len > 16384]
    assert {call.problem.kv_heads for call in long} == {8, 32}  # grouped heads are in no other run of two GPUs
    assert len(long) >= 14
    assert median_error(long, HardwareModel()) < 0.02
    found = [choice for choice in comparisons(calls, HardwareModel()) if choice.side == "another host"]
    assert len(found) >= 6
    assert [choice for choice in found if not choice.within_noise] == []


def test_a_choice_is_judged_by_the_calls_of_one_run(calls: list[MeasuredCall]) -> None:
    call = next(call for call in causal(calls) if call.schedule == "ring" and call.problem.cp_size > 1)
    chosen = "ring"

    def pair(ring: list[float], ulysses: list[float]) -> list[MeasuredCall]:
        return [replace(call, rounds=[ring]), replace(call, schedule="ulysses", rounds=[ulysses])]

    # A model in which steps of a ring cost nothing takes the ring.
    model = replace(HardwareModel(), head_chunk_seconds=1.0, head_call_seconds=10.0, start_seconds=1.0, step_tail=0.0)
    [better] = comparisons(pair([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]), model)
    assert (better.schedule, better.behind, better.within_noise) == (chosen, 0.0, True)
    [worse] = comparisons(pair([2.0, 2.0, 2.0], [1.0, 1.0, 1.0]), model)
    assert (worse.behind, worse.within_noise) == (1.0, False)
    [noisy] = comparisons(pair([2.0, 2.0, 2.0], [0.2, 1.0, 2.4]), model)
    assert noisy.within_noise
    elsewhere = [*pair([1.0], [2.0])[:1], replace(pair([1.0], [2.0])[1], folder="another")]
    assert comparisons(elsewhere, model) == []


def drawn_trials(count: int) -> Iterator[tuple[TrialSettings, int]]:
    """Trials of burst, and their ranks of a node, as a user may ask for them."""
    draw = random.Random(29)
    while count:
        nodes, kv_heads = draw.choice((1, 1, 2, 4)), draw.choice((1, 2, 4, 8, 16, 32, 40))
        heads = kv_heads * draw.choice((1, 1, 2, 4, 8))
        model = ModelShape(
            name="s", layers=4, hidden=4096, ffn=64, heads=heads, kv_heads=kv_heads, head_dim=draw.choice((64, 128)),
            vocab=64,
        )  # fmt: skip
        node_size = draw.choice((1, 2, 4, 8))
        cp_size, mask = nodes * node_size, draw.choice(("causal", "causal", "full", "sliding_window:4095"))
        switches: dict[str, str] = {}
        if draw.random() < 0.4:
            switches["schedule"] = draw.choice(("ring", "double_ring", "ulysses", "usp", "usp_transposed"))
        if draw.random() < 0.2:
            switches["backward"] = draw.choice(("query", "key_value"))
        checkpoint = Checkpoint(
            every=draw.choice((0, 1, 1, 2)), tail=draw.choice((0.0, 0.5, 1.0)), whole_layers=draw.choice((0, 0, 2, 4)),
            replay=draw.choice(("hold", "bisect")),
        )  # fmt: skip
        settings = TrialSettings(
            task=draw.choice(("train", "train", "train", "attention")), method="burst", model=model, cp_size=cp_size,
            seq_len=cp_size << draw.randrange(10, 17), dtype=draw.choice(("bf16", "bf16", "fp32")), mask=mask,
            layout=draw.choice(("auto", "zigzag", "contiguous", "striped")), checkpoint=checkpoint,
            grad_comm_dtype=draw.choice(("auto", "auto", "input_across", "input_after_first", "input")),
            deterministic=draw.random() < 0.2, batch_size=draw.choice((1, 1, 2)), **switches,
        )  # fmt: skip
        if parse_mask(mask).unsupported_reason(settings.seq_len) is None:
            count -= 1
            yield settings, node_size


ACROSS = 5.0  # GiB/s of the link between nodes, as the ranks measure it and as the hardware file has it


NO_COPIES = "no GPU copies here"


def chosen_by_ranks(settings: TrialSettings, node_size: int) -> Resolved:
    """What the trainer's own attention resolves on rank 0 of as many GPUs as the trial has. Tensors have shapes and no
    memory, and no group is made: choices are made before anything is sent."""
    dist.init_process_group("fake", rank=0, world_size=settings.cp_size, store=FakeStore())
    try:
        cp = ContextParallel(layout=METHOD.layout(settings), node_size=node_size)
        cp.comms._across_gib.append(ACROSS)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[settings.dtype]
        tokens, shape = settings.seq_len // settings.cp_size, settings.model
        with FakeTensorMode():
            q, k = (
                torch.empty(settings.batch_size, tokens, heads, shape.head_dim, dtype=dtype, device="cuda")
                for heads in (shape.heads, shape.kv_heads)
            )
            return METHOD.attention(cp, settings).prepared(q, k).plan.choice
    finally:
        dist.destroy_process_group()


def test_engine_prediction_and_memory_planner_resolve_a_trial_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks' attention chooses for a few hundred trials on GPUs, and what is read of them without ranks."""
    monkeypatch.setattr(Communicators, "copies_unsupported_reason", lambda *_: NO_COPIES)
    monkeypatch.setattr(
        Communicators, "_subgroup", lambda _, ranks, __: dist.new_group(list(ranks)) if len(ranks) > 1 else None
    )
    # The other ranks of the imagined groups are not there to agree with.
    monkeypatch.setattr(communicators, "timeout_of", lambda _: timedelta(seconds=1))
    monkeypatch.setattr(communicators.Agreement, "of", lambda *_: None)
    monkeypatch.setattr(type(flex.KERNEL), "unsupported_reason", lambda _: None)
    monkeypatch.setattr(type(flex.KERNEL), "refuse", lambda *_: None)
    speeds = replace(speeds_of(hardware_named("h200")), across_gib=ACROSS)
    taken: collections.Counter[tuple[str, bool]] = collections.Counter()
    refused = 0
    for settings, node_size in drawn_trials(300):
        settings = replace(settings, kernel="flex")
        problem = attention_problem(settings, node_size)
        try:
            found = layer_attention(settings, replace(problem, copies_unsupported_reason=NO_COPIES), speeds).resolved
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error))):
                chosen_by_ranks(settings, node_size)
            refused += 1
            continue
        ranks = chosen_by_ranks(settings, node_size)
        assert ranks == found, settings
        assert ranks.backward == found.backward, settings
        planned = resolve_trial(settings, node_size, found.hardware)
        assert planned == layer_attention(settings, problem, speeds).resolved, settings
        taken[found.schedule, found.choices.recompute] += 1
    assert {("ring", True), ("ring", False), ("ulysses", True), ("ulysses", False), ("usp", True)} <= taken.keys()
    assert refused > 10


def test_a_prediction_of_auto_is_a_ring_where_the_rings_own_switches_are_set() -> None:
    model = ModelShape(name="s", layers=1, hidden=4096, ffn=64, heads=32, kv_heads=32, head_dim=128, vocab=64)
    trial = TrialSettings(task="attention", method="burst", model=model, seq_len=1 << 16, cp_size=8, dtype="bf16")
    speeds = speeds_of(hardware_named("h200"))

    def schedule(node_size: int, **changes: str) -> str:
        settings = replace(trial, **changes)
        return layer_attention(settings, attention_problem(settings, node_size), speeds).schedule

    assert (schedule(8), schedule(4)) == ("ulysses", "usp")
    for by_hand in ({"backward": "key_value"}, {"backward": "query"}, {"exchange": "copy_engine"}):
        assert (schedule(8, **by_hand), schedule(4, **by_hand)) == ("ring", "double_ring")


def test_a_listed_folder_without_records_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere holds no records; copy the run there, or take nowhere out of"):
        measured_calls(tmp_path, ["nowhere"])


def test_the_committed_tables_are_what_the_cost_model_gives_today(calls: list[MeasuredCall]) -> None:
    model = HardwareModel()
    with TABLE_FILE.open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == table_rows(calls, model)
    page = PAGE.read_text(encoding="utf-8")
    blocks = {
        CONSTANTS: constant_table(model),
        ERRORS: error_table(calls, model),
        CHOICES: comparison_table(comparisons(calls, model)),
    }
    for name, text in blocks.items():
        begin, end = marks(name)
        assert page.partition(begin)[2].partition(end)[0].strip() == text
