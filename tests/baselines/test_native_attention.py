"""Each native baseline sends its system's bytes, and refuses what that system cannot do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.spec.methods import method_module, method_named
from tests.baselines.attention_runs import SHAPE, AttentionRun, run_attention, settings_for
from tests.ranks import run_on_ranks

SCHEDULES = {  # of each method over two nodes of two ranks
    "loongtrain_double_ring": ("double_ring",),
    "loongtrain_usp": ("usp", "usp_transposed"),
    "megatron_cp": ("ring", "all_gather", "ulysses", "usp"),
}


def runs_of_all() -> list[AttentionRun]:
    return [
        run_attention(method_module(name), settings_for(name, 4, **given_of(name, schedule)), False, 2)
        for name, schedules in SCHEDULES.items()
        for schedule in schedules
    ]


def given_of(name: str, schedule: str) -> dict[str, str]:
    return {} if name == "loongtrain_double_ring" else {"schedule": schedule}


def test_over_two_nodes_a_baseline_is_what_it_is_named_for() -> None:
    expected = [schedule for schedules in SCHEDULES.values() for schedule in schedules]
    for runs in run_on_ranks(4, runs_of_all):
        assert [run.resolved["schedule"] for run in runs] == expected
        assert max(run.error for run in runs) < 1e-10
        assert "key_value" in runs[0].resolved["backward"]
    refused = method_named("megatron_cp").refuse(settings_for("megatron_cp", 4, schedule="usp_transposed"))
    assert "always uses schedule ring" in str(refused)


def test_ulysses_refuses_heads_that_its_ranks_cannot_divide() -> None:
    refuse = method_named("ulysses").refuse
    three = replace(SHAPE, name="three", heads=12, kv_heads=3)
    assert refuse(settings_for("ulysses", 3, seq_len=48)) == (
        "ulysses needs query heads divisible by cp_size, found 8 heads of model test and cp_size 3; "
        "choose a cp_size that divides 8"
    )
    assert refuse(settings_for("ulysses", 4, model=three)) == (
        "ulysses needs KV heads divisible by cp_size, or cp_size by KV heads, found 3 heads of model three and cp_size "
        "4; choose a cp_size that divides 3 or is a multiple of it"
    )
    assert refuse(settings_for("ulysses", 8, seq_len=64)) is None
    assert refuse(settings_for("ulysses", 4)) is None


def test_torch_cp_refuses_masks_that_torch_does_not_know() -> None:
    assert method_named("torch_cp").refuse(settings_for("torch_cp", 2, mask="sliding_window:9")) == (
        "torch_cp knows the masks full and causal, found sliding_window:9; choose one of them"
    )
    assert "always sends gradients in fp32" in str(
        method_named("torch_cp").refuse(settings_for("torch_cp", 2, grad_comm_dtype="input"))
    )


def test_torch_cp_refuses_a_model_with_sinks() -> None:
    settings = settings_for("torch_cp", 2)
    with_sinks = replace(settings, model=replace(settings.model, sinks=True))
    refused = method_named("torch_cp").refuse(with_sinks)
    assert refused == f"torch_cp has no sinks, which model {settings.model.name} has; choose a model without them"


@pytest.mark.parametrize("name", ["ring", "megatron_cp", "ulysses", "loongtrain_double_ring", "loongtrain_usp"])
def test_a_baseline_refuses_settings_that_its_system_does_not_have(name: str) -> None:
    refuse = method_named(name).refuse
    assert "always uses layout" in str(refuse(settings_for(name, 2, layout="striped")))
    assert f"{name} " in str(refuse(settings_for(name, 2, backward="query")))
    assert f"{name} " in str(refuse(settings_for(name, 2, exchange="direct")))
    assert "tensor parallelism" in str(refuse(settings_for(name, 2, tp_size=2)))
    assert "nearest lengths" in str(refuse(settings_for(name, 4, seq_len=30)))
