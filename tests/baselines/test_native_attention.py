"""Each native baseline sends its system's bytes, and refuses what that system cannot do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.spec.methods import method_module, method_named
from tests.baselines.attention_runs import SHAPE, AttentionRun, run_attention, settings_for
from tests.ranks import run_on_ranks


def runs_on_four(name: str, node_size: int | None = None) -> list[AttentionRun]:
    return run_on_ranks(4, run_attention, method_module(name), settings_for(name, 4), False, node_size)


@pytest.mark.parametrize(("name", "schedule"), [("loongtrain_double_ring", "double_ring"), ("loongtrain_usp", "usp")])
def test_over_two_nodes_a_baseline_is_what_it_is_named_for(name: str, schedule: str) -> None:
    for run in runs_on_four(name, node_size=2):
        assert run.error < 1e-10
        assert run.resolved["schedule"] == schedule
        assert "key_value" in run.resolved["backward"]


def test_ulysses_sends_a_fixed_share_of_every_tensor() -> None:
    world_size, tokens, batch, head_dim, item = 4, 8, 2, 8, 8
    per_head = batch * tokens * head_dim * item
    # Forward q, k, v, out; backward dout, dq, dk, dv; LSE there and delta back for every row and query head.
    heads, rows = (8 + 4 + 4 + 8) + (8 + 8 + 4 + 4), 1 + 1
    expected = (per_head * heads + rows * batch * tokens * 8 * item) * (world_size - 1) // world_size
    assert {run.sent_bytes for run in runs_on_four("ulysses")} == {expected}


@pytest.mark.parametrize("name", ["ring", "megatron_cp"])
def test_ring_baselines_circulate_keys_values_and_their_gradients(name: str) -> None:
    per_hop = 2 * 8 * 4 * 8 * 8  # batch x tokens x KV heads x head_dim x bytes
    assert {run.sent_bytes for run in runs_on_four(name)} == {3 * per_hop * (2 + 4)}


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


@pytest.mark.parametrize("schedule", ["ring", "all_gather", "ulysses", "usp"])
def test_megatron_has_four_communication_types(schedule: str) -> None:
    settings = settings_for("megatron_cp", 4, schedule=schedule)
    for run in run_on_ranks(4, run_attention, method_module("megatron_cp"), settings, False, 2):
        assert run.error < 1e-10
        assert run.resolved["schedule"] == schedule
    assert "always uses schedule ring" in str(
        method_named("megatron_cp").refuse(replace(settings, schedule="usp_transposed"))
    )


def test_loongtrain_places_heads_or_the_ring_inside_a_node() -> None:
    for schedule in ("usp", "usp_transposed"):
        settings = settings_for("loongtrain_usp", 4, schedule=schedule)
        for run in run_on_ranks(4, run_attention, method_module("loongtrain_usp"), settings, False, 2):
            assert run.error < 1e-10
            assert run.resolved["schedule"] == schedule


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
