"""Autocast around attention changes nothing: the inputs' dtype alone says what is computed in what."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from engine import ContextParallel, burst_attention
from engine.attention.kernels import KERNELS, KernelProblem, kernel_named, unsupported_reason
from engine.attention.masks import Causal, Full, Mask, SlidingWindow
from tests.ranks import run_on_ranks

DEVICE = torch.device("cpu")  # a test marked gpu sets another
AROUND = ("forward", "backward", "both")
MASKS = (Full(), Causal(), SlidingWindow(5))


def results(cp: ContextParallel, dtype: torch.dtype, mask: Mask, around: str | None, **choices: object) -> list[Tensor]:
    """out, lse, dq, dk, dv with autocast around the forward, the backward or both."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 32, heads, 16, generator=generator).to(DEVICE, dtype) for heads in (4, 2, 2, 4)]
    q, k, v, dout = (cp.shard(t).detach() for t in whole)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def cast(part: str):
        return torch.autocast(DEVICE.type, torch.bfloat16) if around in (part, "both") else nullcontext()

    with cast("forward"):
        out, lse = burst_attention(*leaves, mask=mask, cp=cp, return_lse=True, **choices)
    with cast("backward"):
        gradients = torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    return [out.detach(), lse.detach(), *gradients]


def differing(dtype: torch.dtype, layout: str, choices: list[dict[str, object]]) -> list[str]:
    """The cases in which autocast changes a dtype or a bit of this rank's results."""
    cp, wrong = ContextParallel(layout=layout), []
    for chosen in choices:
        for mask in MASKS:
            expected = results(cp, dtype, mask, None, **chosen)
            for around in AROUND:
                found = results(cp, dtype, mask, around, **chosen)
                same = all(f.dtype == e.dtype and torch.equal(f, e) for f, e in zip(found, expected, strict=True))
                if not same:
                    wrong.append(f"{chosen} {mask} around {around}")
    return wrong


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_no_bit(dtype, kernel) -> None:
    assert differing(dtype, "zigzag", [{"kernel": kernel}]) == []


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_autocast_does_not_change_the_sent_bytes(layout) -> None:
    choices = [
        {"kernel": kernel, "backward": backward, "schedule": schedule}
        for kernel in ("reference", "cpu")
        for backward, schedule in (("query", "ring"), ("key_value", "ring"), ("auto", "ulysses"))
    ]
    assert run_on_ranks(2, differing, torch.float32, layout, choices) == [[], []]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: runs its kernels")
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_autocast_changes_nothing_above_rounding_on_a_gpu(monkeypatch, dtype, kernel) -> None:
    monkeypatch.setitem(globals(), "DEVICE", torch.device("cuda"))
    problem = KernelProblem(device=DEVICE, dtype=dtype, heads=4, kv_heads=2, head_dim=16)
    reason = unsupported_reason(kernel_named(kernel), problem)
    if reason:
        pytest.skip(reason)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for mask in (Full(), Causal()):
        expected = results(ContextParallel.single(), dtype, mask, None, kernel=kernel)
        for around in AROUND:
            found = results(ContextParallel.single(), dtype, mask, around, kernel=kernel)
            for f, e in zip(found, expected, strict=True):
                assert f.dtype == e.dtype
                torch.testing.assert_close(f, e, rtol=tolerance, atol=tolerance)
