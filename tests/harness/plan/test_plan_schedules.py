"""A plan refuses the schedules that its ranks would refuse, in the same words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.attention.problem import HeadsAndRanks, schedule_unsupported_reason
from engine.settings import TrialSettings
from engine.shape import ModelShape
from harness.machine.this_machine import Machine, together
from harness.plan.unsupported import unsupported_reason

LAPTOP = Machine(hostname="laptop", device="cpu", cores=2, memory_gib=8)
SHAPE = ModelShape(name="small", layers=1, hidden=64, ffn=96, heads=8, kv_heads=2, head_dim=8, vocab=256)


def trial(**changes: object) -> TrialSettings:
    values: dict[str, object] = {"task": "attention", "method": "burst", "seq_len": 1024, "dtype": "fp32"}
    return TrialSettings(model=SHAPE, **values | changes)  # type: ignore[arg-type]


def ranks_say(settings: TrialSettings, node_size: int, layout: str = "zigzag") -> str | None:
    share = HeadsAndRanks(cp_size=settings.cp_size, node_size=node_size, heads=SHAPE.heads, kv_heads=SHAPE.kv_heads)
    return schedule_unsupported_reason(settings.schedule, share, layout)


@pytest.mark.parametrize("schedule", ["ulysses", "usp", "usp_transposed"])
def test_heads_are_not_traded_in_stripes(schedule: str) -> None:
    settings = trial(schedule=schedule, layout="striped", cp_size=4, emulate_nodes=2)
    expected = f"schedule {schedule} needs runs of consecutive tokens, found layout striped; choose zigzag or"
    if schedule == "ulysses":  # which fails on its heads before
        settings = replace(settings, model=replace(SHAPE, kv_heads=4))
    assert (unsupported_reason(settings, LAPTOP) or "").startswith(expected)
    assert unsupported_reason(replace(settings, layout="contiguous"), LAPTOP) is None


def test_a_ring_takes_stripes_and_so_does_a_single_rank() -> None:
    assert unsupported_reason(trial(schedule="ring", layout="striped", cp_size=4), LAPTOP) is None
    assert unsupported_reason(trial(schedule="ulysses", layout="striped"), LAPTOP) is None


@pytest.mark.parametrize(
    ("schedule", "cp_size", "nodes", "fits"),
    [
        ("ulysses", 2, 1, True),
        ("ulysses", 4, 1, False),
        ("ulysses", 4, 2, False),
        ("usp", 4, 1, False),
        ("usp", 4, 2, True),
        ("usp", 8, 2, False),
        ("usp_transposed", 8, 1, True),
        ("usp_transposed", 8, 2, True),
        ("usp_transposed", 8, 4, False),
    ],
)
def test_heads_are_shared_out_among_the_ranks_that_trade(schedule: str, cp_size: int, nodes: int, fits: bool) -> None:
    settings = trial(schedule=schedule, cp_size=cp_size, emulate_nodes=nodes)
    found = unsupported_reason(settings, LAPTOP)
    assert found == ranks_say(settings, cp_size // nodes)
    assert (found is None) == fits
    assert fits or "choose schedule ring or double_ring" in (found or "")
    several = together([LAPTOP] * nodes, ranks_per_node=cp_size // nodes)
    assert unsupported_reason(replace(settings, emulate_nodes=1), several) == found  # real nodes are no different


def test_replicas_that_have_a_node_each_trade_within_it() -> None:
    inside = trial(schedule="usp", cp_size=2, world_size=4, emulate_nodes=2)
    assert unsupported_reason(inside, LAPTOP) is None
    uneven = trial(schedule="usp", cp_size=4, world_size=8, emulate_nodes=1)
    assert unsupported_reason(uneven, LAPTOP) == ranks_say(uneven, 4)


def test_where_ranks_do_not_fit_the_machine_that_is_the_reason() -> None:
    settings = trial(schedule="usp", cp_size=16)
    assert "16 ranks are more than the 8 processes" in (unsupported_reason(settings, LAPTOP) or "")


def test_a_schedule_that_a_method_fixes_is_judged_too() -> None:
    assert "schedule usp divides KV heads among 4 ranks and 2 do not" in (
        unsupported_reason(trial(method="loongtrain_usp", cp_size=4), LAPTOP) or ""
    )
    assert unsupported_reason(trial(method="loongtrain_usp", cp_size=4, emulate_nodes=2), LAPTOP) is None


def test_heads_that_a_method_repeats_are_enough_for_its_schedule() -> None:
    for schedule in ("auto", "ulysses"):
        assert unsupported_reason(trial(method="ulysses", schedule=schedule, cp_size=8), LAPTOP) is None
    assert "ulysses divides KV heads among 8 ranks" in (
        unsupported_reason(trial(schedule="ulysses", cp_size=8), LAPTOP) or ""
    )


def test_the_task_without_attention_trades_nothing() -> None:
    settings = trial(task="lm_head", schedule="ulysses", cp_size=4)
    assert unsupported_reason(settings, LAPTOP) is None
