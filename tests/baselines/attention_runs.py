"""One method's attention on ranks, beside dense attention: what the tests of methods share."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine import ContextParallel
from engine.attention.masks import parse_mask
from engine.attention.reference import dense_gradients
from engine.settings import TrialSettings
from engine.shape import ModelShape

SHAPE = ModelShape(name="test", layers=1, hidden=32, ffn=64, heads=8, kv_heads=4, head_dim=8, vocab=256)


@dataclass(frozen=True, kw_only=True)
class AttentionRun:
    """One forward and backward on one rank."""

    error: float  # the largest of out, dq, dk and dv against dense float64, relative to the largest value
    sent_bytes: int  # counted
    computed_sent_bytes: int | None  # by the plan's arithmetic; None of a method without it
    computed_far_bytes: int | None  # those of them for other nodes
    resolved: dict[str, str]


def settings_for(method: str, cp_size: int, **changes: Any) -> TrialSettings:
    values = {"task": "attention", "method": method, "model": SHAPE, "seq_len": 32, "cp_size": cp_size}
    return TrialSettings(**(values | {"dtype": "fp64", "kernel": "reference"} | changes))


def run_all(module: str, trials: Sequence[TrialSettings]) -> list[AttentionRun]:
    """The attention of the method that `module` defines, once for each of these settings."""
    return [run_attention(module, settings) for settings in trials]


def run_attention(
    module: str, settings: TrialSettings, replay: bool = False, node_size: int | None = None
) -> AttentionRun:
    """`replay`: the output comes from a second call that is given what the first one kept."""
    method: Any = importlib.import_module(module).METHOD
    cp = ContextParallel(layout=method.layout(settings), node_size=node_size)
    fn = method.attention(cp, settings)
    shape = settings.model
    torch.manual_seed(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    whole = [torch.randn(2, settings.seq_len, n, shape.head_dim, dtype=torch.float64) for n in heads]
    q, k, v, dout = (cp.shard(t).clone().requires_grad_() for t in whole)
    out, lse = fn(q, k, v)
    if replay:
        out, _ = fn(q, k, v, saved=fn.keep(out, lse, 1.0))
    out.backward(dout)
    results = (out.detach(), q.grad, k.grad, v.grad)
    pairs = zip(results, dense_gradients(*whole, parse_mask(settings.mask)), strict=True)
    compute = getattr(fn, "computed_sent", None)
    computed = compute() if compute else None
    return AttentionRun(
        error=max(((cp.unshard(found) - truth).abs().max() / truth.abs().max()).item() for found, truth in pairs),
        sent_bytes=cp.traffic.sent_bytes,
        computed_sent_bytes=computed.total if computed else None,
        computed_far_bytes=computed.far if computed else None,
        resolved=fn.resolved(),
    )
