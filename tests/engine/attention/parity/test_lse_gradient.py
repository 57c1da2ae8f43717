"""The gradient of the LSE goes to Q and K and leaves dV alone, however small the output's own gradient is."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from engine import ContextParallel, burst_attention
from engine.attention.kernels import KERNELS, KernelProblem, kernel_named, unsupported_reason
from engine.attention.masks import Causal, Documents, Full, Mask, SlidingWindow
from engine.attention.op import run_attention
from engine.attention.reference import dense_gradients
from tests.plans import plan_attention
from tests.ranks import run_on_ranks

DEVICE = torch.device("cpu")  # a test marked gpu sets another
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 16
MASKS = (Full(), Causal(), SlidingWindow(5), Documents((12, 20)))
# Largest error, in parts of the largest entry. In half precision what is left is rounding: of results and of out, and
# on GPUs also of probabilities.
ON_A_GPU = 3
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SIZES = {  # of the output's gradient where the LSE's is 1: those of one row in two; the others are 0
    torch.float64: (1.0, 1e-9, 1e-200, 0.0),
    torch.float32: (1.0, 1e-3, 1e-9, 1e-30, 0.0),
    torch.bfloat16: (1.0, 1e-3, 1e-9, 1e-30, 0.0),
    torch.float16: (1.0, 1e-2, 1e-3, 1e-6, 0.0),
}
NAMES = ("dq", "dk", "dv")


def inputs(dtype: torch.dtype, size: float) -> list[Tensor]:
    """q, k, v and the gradients of out and, [B, L, N], of the LSE, of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, TOKENS, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    dout = dout.double().mul(size).to(dtype)
    dout[:, ::2] = 0
    dlse = 1 + torch.rand(2, TOKENS, HEADS, generator=generator).to(DEVICE)
    return [q, k, v, dout, dlse]


def wrong(cp: ContextParallel, dtype: torch.dtype, mask: Mask, only_on: int | None, **choices: object) -> list[str]:
    """The gradients that are not those of dense float64, by size of the output's gradient. `only_on`: the one rank
    whose LSE is used."""
    faults = []
    for size in SIZES[dtype] if cp.size == 1 else SIZES[dtype][::2]:
        whole = inputs(dtype, size)
        if only_on is not None:
            mine = cp.positions(TOKENS, DEVICE) if cp.rank == only_on else torch.tensor([], dtype=torch.int64)
            used = torch.zeros(TOKENS)
            used[mine] = 1
            torch.distributed.all_reduce(used)
            whole[4] = whole[4] * used[:, None]
        leaves = [cp.shard(t).detach().clone().requires_grad_() for t in whole[:3]]
        dout, dlse = (cp.shard(t) for t in whole[3:])
        out, lse = burst_attention(*leaves, mask=mask, cp=cp, return_lse=True, **choices)
        outputs, gradients = [out], [dout]
        if only_on in (None, cp.rank):
            outputs, gradients = [out, lse], [dout, dlse.transpose(1, 2).to(lse.dtype)]
        found = torch.autograd.grad(outputs, leaves, gradients)
        _, *truths = dense_gradients(*whole[:4], mask, dlse_BNS=whole[4].transpose(1, 2))
        for name, part, expected in zip(NAMES, found, truths, strict=True):
            largest = expected.abs().max().item()
            # Below its least normal number fp16 has steps of 2^-24.
            factor = ON_A_GPU if DEVICE.type == "cuda" and dtype.itemsize == 2 else 1
            room = factor * TOLERANCES[dtype] * largest + (2**-24 if dtype == torch.float16 else 0)
            error = (cp.unshard(part).double() - expected).abs().max().item()
            if not error <= room:
                faults.append(f"{name} of {mask} {choices}, out's gradient {size}: off by {error} of {largest}")
    return faults


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", SIZES, ids=str)
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_gradients_of_output_and_lse_are_both_exact(kernel, dtype, mask) -> None:
    assert wrong(ContextParallel.single(), dtype, mask, None, kernel=kernel) == []


def wrong_on_ranks() -> list[str]:
    cp, faults = ContextParallel(), []
    ways = [("query", "ring"), ("key_value", "ring"), ("auto", "ulysses")]
    for dtype, (backward, schedule) in itertools.product((torch.float32, torch.float16), ways):
        for mask, only_on in itertools.product((Causal(), SlidingWindow(5)), (None, 0)):
            choices = {"kernel": "cpu", "backward": backward, "schedule": schedule}
            faults += wrong(cp, dtype, mask, only_on, **choices)
    return faults


def test_they_are_exact_where_chunks_are_sent_and_where_only_one_rank_uses_its_lse() -> None:
    assert run_on_ranks(2, wrong_on_ranks) == [[], []]


@pytest.mark.parametrize("dtype", SIZES, ids=str)
@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_an_lse_used_alone_gives_values_no_gradient_at_all(kernel, dtype) -> None:
    for mask in MASKS:
        leaves = [t.requires_grad_() for t in inputs(dtype, 1.0)[:3]]
        _, lse = burst_attention(*leaves, mask=mask, kernel=kernel, return_lse=True)
        lse.sum().backward()
        assert leaves[2].grad.count_nonzero() == 0
        assert leaves[0].grad.count_nonzero() > 0


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
def test_a_plan_without_a_gradient_of_the_lse_refuses_one_that_its_kernel_would_lose(kernel) -> None:
    q, k, v, *_ = inputs(torch.float32, 1.0)
    q.requires_grad_()
    plan = plan_attention(q, k, mask=Causal(), cp=ContextParallel.single(), kernel=kernel, lse_gradient=False)
    out, lse = run_attention(plan, q, k, v, return_lse=True)
    out.sum().backward(retain_graph=True)
    if kernel_named(kernel).takes_delta:
        lse.sum().backward()
    else:
        with pytest.raises(ValueError, match="plan it with lse_gradient=True"):
            lse.sum().backward()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: runs its kernels")
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "cpu"])
def test_gradients_of_output_and_lse_are_both_exact_on_a_gpu(monkeypatch, kernel, dtype, mask) -> None:
    monkeypatch.setitem(globals(), "DEVICE", torch.device("cuda"))
    bands = frozenset({"full", "causal", "band"} if isinstance(mask, SlidingWindow) else {"full", "causal"})
    problem = KernelProblem(device=DEVICE, dtype=dtype, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, bands=bands)
    reason = unsupported_reason(kernel_named(kernel), problem)
    if reason:
        pytest.skip(reason)
    assert wrong(ContextParallel.single(), dtype, mask, None, kernel=kernel) == []
    leaves = [t.requires_grad_() for t in inputs(dtype, 1.0)[:3]]
    _, lse = burst_attention(*leaves, mask=mask, kernel=kernel, return_lse=True)
    lse.sum().backward()
    assert leaves[2].grad.count_nonzero() == 0
