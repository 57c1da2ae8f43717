"""Each native baseline gives dense attention's numbers, sends its system's bytes, and refuses what it cannot do."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch

from engine import ContextParallel
from engine.attention.masks import Causal
from engine.attention.reference import dense_attention
from engine.settings import ModelShape, TrialSettings
from tests.ranks import run_on_ranks
from tests.slow import combinations

BASELINES = ("ring", "megatron_cp", "ulysses", "loongtrain_double_ring", "loongtrain_usp")
SHAPE = ModelShape(name="test", layers=1, hidden=32, ffn=64, heads=8, kv_heads=4, head_dim=8, vocab=256)


def settings_for(method: str, cp_size: int, **changes) -> TrialSettings:
    values = {"task": "attention", "method": method, "model": SHAPE, "seq_len": 32, "cp_size": cp_size}
    return TrialSettings(**(values | {"dtype": "fp64", "kernel": "reference"} | changes))


def method_named(name: str):
    return importlib.import_module(f"baselines.{name}").METHOD


def attention_errors(name: str, replay: bool, node_size: int | None = None) -> tuple[list[float], int]:
    """(relative error of out, dq, dk, dv against dense float64, bytes sent)."""
    method = method_named(name)
    settings = settings_for(name, torch.distributed.get_world_size())
    cp = ContextParallel(layout=method.layout(settings), node_size=node_size)
    fn = method.attention(cp, settings)
    torch.manual_seed(0)
    whole = [torch.randn(2, 32, n, 8, dtype=torch.float64) for n in (8, 4, 4, 8)]
    q, k, v, dout = (cp.shard(t).clone().requires_grad_() for t in whole)
    out, lse = fn(q, k, v)
    if replay:
        out, _ = fn(q, k, v, stored=fn.keep(out, lse, 1.0))
    out.backward(dout)
    dense_q, dense_k, dense_v = (t.clone().requires_grad_() for t in whole[:3])
    dense_out, _ = dense_attention(dense_q, dense_k, dense_v, Causal())
    dense_out.backward(whole[3])
    pairs = [(out.detach(), dense_out.detach())] + [
        (found.grad, truth.grad) for found, truth in ((q, dense_q), (k, dense_k), (v, dense_v))
    ]
    errors = [((cp.unshard(f) - t).abs().max() / t.abs().max()).item() for f, t in pairs]
    assert fn.resolved()["kernel"] == "reference"
    return errors, cp.traffic.sent_bytes


@combinations({"name": BASELINES, "world_size": [4, 2, 1], "replay": [False, True]})
def test_a_baseline_equals_dense_float64(name, world_size, replay) -> None:
    for errors, _ in run_on_ranks(world_size, attention_errors, name, replay):
        assert max(errors) < 1e-10


@pytest.mark.parametrize(("name", "schedule"), [("loongtrain_double_ring", "double_ring"), ("loongtrain_usp", "usp")])
def test_over_two_nodes_a_baseline_is_what_it_is_named_for(name, schedule) -> None:
    for (errors, _), chosen in run_on_ranks(4, over_two_nodes, name):
        assert max(errors) < 1e-10
        assert chosen["schedule"] == schedule
        assert "key_value" in chosen["backward"]


def over_two_nodes(name: str) -> tuple[tuple[list[float], int], dict[str, str]]:
    settings = settings_for(name, 4)
    cp = ContextParallel(layout="zigzag", node_size=2)
    fn = method_named(name).attention(cp, settings)
    fn(*(torch.zeros(1, 8, heads, 8, dtype=torch.float64) for heads in (8, 4, 4)))
    return attention_errors(name, False, node_size=2), fn.resolved()


def test_ulysses_sends_a_fixed_share_of_every_tensor() -> None:
    world_size, tokens, batch, head_dim, item = 4, 8, 2, 8, 8
    per_head = batch * tokens * head_dim * item
    # Forward q, k, v, out; backward dout, dq, dk, dv; LSE there and delta back for every row and query head.
    heads, rows = (8 + 4 + 4 + 8) + (8 + 8 + 4 + 4), 1 + 1
    expected = (per_head * heads + rows * batch * tokens * 8 * item) * (world_size - 1) // world_size
    for _, sent in run_on_ranks(world_size, attention_errors, "ulysses", False):
        assert sent == expected


def test_ring_baselines_circulate_keys_values_and_their_gradients() -> None:
    per_hop = 2 * 8 * 4 * 8 * 8  # batch x tokens x KV heads x head_dim x bytes
    for name in ("ring", "megatron_cp"):
        for _, sent in run_on_ranks(4, attention_errors, name, False):
            assert sent == 3 * per_hop * (2 + 4)


def test_ulysses_refuses_heads_it_cannot_share_out() -> None:
    unsupported_reason = method_named("ulysses").refuse(settings_for("ulysses", 8, seq_len=64))
    assert unsupported_reason == (
        "ulysses needs KV heads divisible by cp_size, found 4 heads of model test and cp_size 8; "
        "choose a cp_size that divides 4"
    )
    assert method_named("ulysses").refuse(settings_for("ulysses", 4)) is None


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_refuses_settings_it_does_not_have(name) -> None:
    method = method_named(name)
    assert method.refuse(settings_for(name, 2)) is None
    assert "always uses layout" in method.refuse(settings_for(name, 2, layout="striped"))
    assert f"{name} " in method.refuse(settings_for(name, 2, backward="query"))
    assert f"{name} " in method.refuse(settings_for(name, 2, exchange="direct"))
    assert "tensor parallelism" in method.refuse(settings_for(name, 2, tp_size=2))
    assert "nearest lengths" in method.refuse(settings_for(name, 4, seq_len=30))


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_is_named_after_its_package(name) -> None:
    method = method_named(name)
    assert method.name == name
    assert method.system
    assert method.source
    assert dataclasses.replace(settings_for(name, 1), method=method.name).method == name
