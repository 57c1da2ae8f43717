"""What `auto` becomes: pinned for a few hundred trials, and read alike by engine, memory planner and prediction."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.attention.geometry.layout import as_layout
from engine.attention.masks import Causal, parse_mask
from engine.attention.problem import Problem, divided, problem_of_trial
from engine.attention.resolve import (
    Choices,
    HardwareModel,
    Resolved,
    asks_for_link,
    resolve,
    resolve_trial,
    trial_choices,
    trial_layout,
)
from engine.checkpoint.planning.memory import receive_slot_bytes
from engine.settings import TrialSettings
from harness.spec.models import named_model
from tests.engine.attention.parity.random_trials import trials

PINNED = Path(__file__).parent / "pinned_choices.json"  # of the engine before it had one resolver


def resolved(settings: TrialSettings, link: float | None) -> Resolved:
    """As GPUs that can copy inside a node resolve it, with a link of so many GiB/s between nodes."""
    node_size = settings.cp_size // settings.emulate_nodes
    problem = problem_of_trial(settings, as_layout(trial_layout(settings)), node_size)
    choices = trial_choices(settings)
    measured = link if asks_for_link(problem, choices) and not settings.deterministic else None
    return resolve(problem, HardwareModel(across_gib=measured) if measured else HardwareModel(), choices)


def words(settings: TrialSettings, link: float | None) -> str:
    """Everything that is resolved of a trial, with the bytes of the first and the last rank."""
    if reason := parse_mask(settings.mask).unsupported_reason(settings.seq_len):
        return f"refused: {reason}"
    try:
        found = resolved(settings, link)
    except ValueError as error:
        return f"refused: {error}"
    sent = [found.sent(rank, gathered=not found.choices.recompute) for rank in (0, settings.cp_size - 1)]
    nbytes = [each for call in sent for way in (call.forward, call.backward) for each in (way.near, way.far)]
    return (
        f"{found.layout} {found.schedule} x{found.num_head_chunks} {found.head_exchange or '-'} {found.exchange} "
        f"{found.backward} slots {receive_slot_bytes(settings)} sent {nbytes} gradients {found.summed_bytes} "
        f"{found.estimate or ''}"
    ).rstrip()


def test_every_pinned_trial_resolves_as_before() -> None:
    pinned = json.loads(PINNED.read_text(encoding="utf-8"))
    found = [words(settings, link) for settings, link in trials()]
    assert len({each.split(" x")[0] for each in found}) > 15  # layouts and schedules
    assert found == pinned


def test_the_reason_says_who_chose() -> None:
    settings = next(each for each, _ in trials() if each.cp_size == 8 and each.schedule == "auto")
    settings = replace(settings, backward="auto", exchange="auto", layout="zigzag", emulate_nodes=1)
    found = resolve_trial(settings, 8)
    assert found.reason == f"auto takes {found.schedule}, the fastest by estimate: {found.estimate}"
    by_hand = resolve_trial(replace(settings, backward="query"), 8)
    assert by_hand.reason == "auto is ring because backward or exchange is given"
    assert resolve_trial(replace(settings, schedule="double_ring"), 4).reason == "schedule double_ring is given"
    on_cpu = resolve(replace(found.problem, on_gpu=False), HardwareModel(), Choices())
    assert on_cpu.reason == "auto is ring because the cost model's speeds are those of GPUs"
    assert on_cpu.estimate is None


PROBLEM = Problem(
    mask=Causal(), layout=as_layout("zigzag"), seq_len=4096, batch=1, heads=8, kv_heads=4, head_dim=64, input_bytes=2,
    cp_size=8, node_size=4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"backward": "both"}, "backward 'both' is unknown; choose auto, query or key_value"),
        ({"grad_comm_dtype": "fp8"}, "grad_comm_dtype 'fp8' is unknown; choose one of fp32, input_across"),
        ({"exchange": "mail"}, "exchange 'mail' is unknown; choose auto, relay, direct or copy_engine"),
        ({"schedule": "spiral"}, "schedule 'spiral' is unknown; choose one of auto, ring, double_ring"),
        ({"schedule": "ulysses"}, "schedule ulysses divides KV heads among 8 ranks and 4 do not divide by that"),
        ({"schedule": "usp", "num_head_chunks": 3}, "num_head_chunks 3 does not divide the 1 KV heads of a rank"),
        (
            {"schedule": "all_gather", "backward": "query"},
            "schedule all_gather gathers keys and values in backward too",
        ),
        ({"schedule": "all_gather", "exchange": "relay"}, "schedule all_gather has no ring, found exchange relay; set"),
        ({"schedule": "all_gather", "num_head_chunks": 2}, "sends all heads together, found num_head_chunks 2"),
        ({"schedule": "double_ring", "num_head_chunks": 4}, "leave it out, or choose schedule ulysses, usp"),
        ({"schedule": "ring", "exchange": "copy_engine"}, "this ring has 8 ranks over nodes of 4; choose schedule"),
    ],
)
def test_a_choice_that_cannot_run_is_refused_in_one_sentence(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("'", ".")):
        resolve(PROBLEM, HardwareModel(), Choices(**given))


def test_without_copies_inside_a_node_auto_is_direct_and_copy_engine_is_refused_with_the_reason() -> None:
    alone = replace(PROBLEM, copies_unsupported_reason="the GPUs share no link")
    assert resolve(alone, HardwareModel(), Choices(schedule="double_ring")).exchange == "direct"
    assert resolve(alone, HardwareModel(), Choices(schedule="double_ring")).receive_slot_bytes == 0
    assert resolve(alone, HardwareModel(), Choices(schedule="ring")).exchange == "relay"  # its inner ring spans nodes
    assert resolve(PROBLEM, HardwareModel(), Choices(schedule="double_ring")).receive_slot_bytes > 0
    for schedule in ("double_ring", "usp"):
        with pytest.raises(ValueError, match="the GPUs share no link"):
            resolve(alone, HardwareModel(), Choices(schedule=schedule, exchange="copy_engine"))


@pytest.mark.parametrize("schedule", ["double_ring", "usp", "usp_transposed"])
def test_nodes_of_one_rank_copy_nothing(schedule: str) -> None:
    alone = replace(PROBLEM, kv_heads=8, node_size=1)
    found = resolve(alone, HardwareModel(), Choices(schedule=schedule))
    assert (found.exchange, found.receive_slot_bytes) == ("none" if schedule == "usp_transposed" else "relay", 0)
    with pytest.raises(ValueError, match=f"schedule {schedule} sends nothing there on nodes of 1 ranks; choose"):
        resolve(alone, HardwareModel(), Choices(schedule=schedule, exchange="copy_engine"))


def test_the_ring_between_the_nodes_of_usp_passes_chunks_on() -> None:
    for exchange in ("auto", "copy_engine"):
        found = resolve(PROBLEM, HardwareModel(), Choices(schedule="usp", exchange=exchange))
        assert (found.head_exchange, found.exchange) == ("copy_engine", "relay")


@pytest.mark.parametrize("schedule", ["ring", "double_ring", "ulysses", "usp", "usp_transposed"])
def test_every_rank_is_in_one_all_to_all_and_one_ring_and_every_pair_meets_in_one_of_them(schedule: str) -> None:
    division = divided(schedule, as_layout("zigzag"), 8, 4)
    for rank in range(8):
        members, ring = division.members(rank), division.ring_ranks(rank)
        assert set(members) & set(ring) == {rank}
        assert len(members) * len(ring) == 8
        assert ring[division.ring_rank(rank)] == rank
        assert len(ring) == division.ring.cp_size


@pytest.mark.parametrize("name", ["seq_len", "batch", "heads", "cp_size", "node_size"])
def test_a_size_below_one_is_refused(name: str) -> None:
    problem = Problem(
        mask=Causal(), layout=as_layout("zigzag"), seq_len=1024, batch=1, heads=8, kv_heads=8, head_dim=64,
        input_bytes=2, cp_size=4, node_size=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"{name} is 0; give a number of at least 1"):
        resolve(replace(problem, **{name: 0}), HardwareModel(), Choices())
    with pytest.raises(ValueError, match="num_head_chunks is 0; give a whole number"):
        resolve(problem, HardwareModel(), Choices(schedule="ring", num_head_chunks=0))
    with pytest.raises(ValueError, match="across_gib is nan; give a speed above 0"):
        resolve(problem, HardwareModel(across_gib=float("nan")), Choices())


def test_layers_with_a_window_have_receive_slots_of_their_own_schedule() -> None:
    """Full layers and layers with a window of one model resolve their schedules apart."""
    settings = TrialSettings(
        task="train", method="burst", model=named_model("gemma3_4b"), seq_len=131072, cp_size=4, layout="zigzag"
    )
    full, window = (resolve_trial(settings, 4, mask=mask) for mask in settings.masks)
    assert full.schedule != window.schedule
    assert receive_slot_bytes(settings) == full.receive_slot_bytes + window.receive_slot_bytes
