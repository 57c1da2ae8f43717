"""In bf16 the ring rounds nothing that one device would not: the error stays that of a single kernel call."""

from __future__ import annotations

import pytest
import torch

from engine import ContextParallel, burst_attention
from engine.attention.masks import Causal
from engine.attention.reference import dense_gradients
from engine.measurement import relative_errors
from tests.ranks import run_on_ranks
from tests.slow import slow

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 32


def bf16_errors(schedule: str, backward: str) -> list[float]:
    """Relative errors of out, dq, dk, dv against dense float64."""
    cp = ContextParallel()
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(1, TOKENS, heads, HEAD_DIM, generator=generator).bfloat16()
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    q, k, v, dout = (cp.shard(tensor) for tensor in whole)
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    out = burst_attention(q, k, v, mask=Causal(), cp=cp, schedule=schedule, backward=backward, kernel="cpu")
    found = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}
    truths = dense_gradients(*whole, Causal())
    return relative_errors([cp.unshard(value) for value in found], truths)


@pytest.mark.parametrize(
    ("world_size", "schedule", "backward"),
    [(2, "ring", "query"), (2, "ulysses", "auto"), *slow((4, "ring", "query"), (4, "ring", "key_value"))],
)
def test_bf16_error_is_that_of_one_device_for_any_number_of_ranks(world_size, schedule, backward) -> None:
    [alone] = run_on_ranks(1, bf16_errors, "ring", "query")
    for shared in run_on_ranks(world_size, bf16_errors, schedule, backward):
        for name, error, bound in zip(("out", "dq", "dk", "dv"), shared, alone, strict=True):
            assert error <= 1.02 * bound, name
