"""Sinks and soft-capped scores equal dense float64 attention: results and gradients of every schedule and kernel."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine import ContextParallel, burst_attention, prepare_attention
from engine.attention.algorithms.saved import save_suffix
from engine.attention.kernels import KERNELS, KernelProblem, choose_kernel, kernel_named
from engine.attention.masks import Causal, Documents, Mask, SlidingWindow
from engine.attention.reference import dense_attention, dense_gradients
from engine.measurement import relative_errors
from tests.ranks import run_on_ranks
from tests.slow import slow

FEATURES = ((None, True), (1.5, False), (1.5, True))  # softcap, sinks
HEADS = ((4, 4), (8, 4))
SCHEDULES: dict[int, tuple[dict[str, Any], ...]] = {  # by number of ranks, in nodes of two
    1: ({"schedule": "ring"}, {"schedule": "ulysses", "num_head_chunks": 2}),
    2: (
        {"schedule": "ring", "backward": "query"},
        {"schedule": "ring", "backward": "key_value", "exchange": "relay"},
        {"schedule": "all_gather"},
        {"schedule": "ulysses", "num_head_chunks": 2},
        {"schedule": "ulysses", "num_head_chunks": 1, "recompute": True},
    ),
    4: (
        {"schedule": "double_ring", "backward": "query"},
        {"schedule": "usp", "num_head_chunks": 2},
        {"schedule": "usp_transposed", "num_head_chunks": 1},
        {"schedule": "ulysses", "num_head_chunks": 1},
    ),
}


def masks(seq_len: int) -> tuple[Mask, ...]:
    return Causal(), SlidingWindow(3, 2), Documents((5, seq_len - 5), causal=False)


def inputs(seq_len: int, heads: int, kv_heads: int) -> list[Tensor]:
    """q, k, v, dout, dlse [B, S, N] of the whole sequence and the sinks, float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seq_len + heads)
    shapes = [(2, seq_len, n, 8) for n in (heads, kv_heads, kv_heads, heads)] + [(2, seq_len, heads), (heads,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def truth(given: list[Tensor], mask: Mask, softcap: float | None, with_sinks: bool, with_lse: bool) -> list[Tensor]:
    """out, lse [B, S, N], dq, dk, dv and perhaps dsinks."""
    out, lse_BNS, *gradients = dense_gradients(
        *given[:4], mask, softcap=softcap, sinks_N=given[5] if with_sinks else None,
        dlse_BNS=given[4].transpose(1, 2) if with_lse else None, return_lse=True,
    )  # fmt: skip
    return [out, lse_BNS.transpose(1, 2), *gradients]


def found(
    cp: ContextParallel,
    given: list[Tensor],
    mask: Mask,
    with_sinks: bool,
    with_lse: bool,
    tail: float | None,
    **choices: Any,
) -> list[Tensor]:
    """The same of a call on these ranks, with the sinks' gradient summed over them. `tail`: of a call that is given the
    last rows of an earlier one."""
    leaves = [cp.shard(t).clone().requires_grad_() for t in given[:3]]
    sinks = given[5].clone().requires_grad_() if with_sinks else None

    def attend(**more: Any) -> tuple[Tensor, Tensor]:
        return burst_attention(
            *leaves, mask=mask, cp=cp, sinks_N=sinks, return_lse=True, tensor_layout="BSHD", **choices, **more
        )

    out, lse_BNL = attend()
    if tail is not None:
        out, lse_BNL = attend(saved=save_suffix(out, lse_BNL, cp, tail))
    lse = lse_BNL.transpose(1, 2)
    dout, dlse = (cp.shard(t) for t in given[3:5])
    outputs, gradients = ([out, lse], [dout, dlse]) if with_lse else ([out], [dout])
    grads = list(torch.autograd.grad(outputs, [*leaves, *([] if sinks is None else [sinks])], gradients))
    if sinks is not None and cp.size > 1:
        dist.all_reduce(grads[3])
    return [*(cp.unshard(t) for t in (out.detach(), lse.detach(), *grads[:3])), *grads[3:]]


def wrong(cp: ContextParallel, schedules: tuple[dict[str, Any], ...], kernel: str, few: bool = False) -> list[str]:
    """`few`: grouped heads and sinks alone, and a gradient of the LSE where a call is given earlier rows alone."""
    heads_of_calls, features = (HEADS[1:], FEATURES[::2]) if few else (HEADS, FEATURES)
    seq_len, faults = 12 * cp.size, []
    for (heads, kv_heads), mask, (softcap, with_sinks) in itertools.product(heads_of_calls, masks(seq_len), features):
        if kernel == "cpu" and softcap is not None:
            continue
        given = inputs(seq_len, heads, kv_heads)
        for with_lse in (False, True):
            expected = truth(given, mask, softcap, with_sinks, with_lse)
            tails = ((0.4,) if with_lse else (None,)) if few else (None, 0.4, 1.0)
            for choices, tail in itertools.product(schedules, tails):
                options = {"kernel": kernel, "softcap": softcap, **choices}
                results = found(cp, given, mask, with_sinks, with_lse, tail, **options)
                error = max((one - two).abs().max().item() for one, two in zip(results, expected, strict=True))
                if not error < 1e-10:
                    faults.append(f"{error:.1e}: {mask} {heads}:{kv_heads} {options} sinks {with_sinks}, tail {tail}")
    return faults


def wrong_on_ranks(kernel: str, few: bool) -> list[str]:
    ranks = dist.get_world_size()
    return wrong(ContextParallel(node_size=min(2, ranks)), SCHEDULES[ranks], kernel, few)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_they_equal_dense_float64_on_one_device(kernel) -> None:
    assert wrong(ContextParallel.single(), SCHEDULES[1], kernel) == []


@pytest.mark.parametrize("few", [True, *slow(False)])
@pytest.mark.parametrize(("ranks", "kernel"), [(2, "reference"), (2, "cpu"), (4, "reference")])
def test_they_equal_dense_float64_under_every_schedule(ranks, kernel, few) -> None:
    assert run_on_ranks(ranks, wrong_on_ranks, kernel, few) == [[]] * ranks


def test_a_query_without_keys_has_only_its_sink_and_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v, *_, sinks = inputs(8, 4, 4)
    sinks[0] = -torch.inf
    blind = SlidingWindow(0, 0)
    sinks.requires_grad_()
    out, lse = burst_attention(q, k, v, mask=blind, sinks_N=sinks, return_lse=True)
    assert torch.equal(out[:, :, 0], v[:, :, 0])
    expected = torch.logaddexp((q * k).sum(-1) * 8**-0.5, sinks.detach()).transpose(1, 2)
    torch.testing.assert_close(lse, expected)
    (gradient,) = torch.autograd.grad(lse.sum(), sinks)
    torch.testing.assert_close(gradient, (sinks.detach()[:, None] - expected).exp().sum(dim=(0, 2)))


def test_sinks_may_have_another_dtype_and_no_gradient_elsewhere() -> None:
    q, k, v, dout, _, sinks = inputs(16, 4, 2)
    sinks = sinks.to(torch.bfloat16).requires_grad_()
    out = burst_attention(q, k, v, sinks_N=sinks)
    (gradient,) = torch.autograd.grad(out, sinks, dout)
    wide = sinks.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(dense_attention(q, k, v, Causal(), sinks_N=wide)[0], wide, dout)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, expected.bfloat16())


@pytest.mark.parametrize("layout", ["BSHD", "BHSD", "THD"])
def test_a_prepared_call_gives_the_same_bits(layout) -> None:
    q, k, v, *_, sinks = inputs(16, 4, 2)
    if layout != "BSHD":
        q, k, v = (t[0] if layout == "THD" else t.transpose(1, 2) for t in (q, k, v))
    attend = prepare_attention(q, k, softcap=2.0, tensor_layout=layout)
    expected = burst_attention(q, k, v, softcap=2.0, sinks_N=sinks, tensor_layout=layout)
    assert torch.equal(attend(q, k, v, sinks_N=sinks), expected)
    assert not torch.equal(attend(q, k, v), expected)
    assert not torch.equal(prepare_attention(q, k, tensor_layout=layout)(q, k, v, sinks_N=sinks), expected)


Q = torch.zeros(1, 8, 4, 16)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"softcap": 0}, "softcap is 0; give a finite bound of the scores above 0"),
        ({"softcap": -2.0}, "softcap is -2.0"),
        ({"softcap": math.inf}, "softcap is inf"),
        ({"softcap": "auto"}, "softcap is 'auto'"),
        ({"sinks_N": [0.0] * 4}, "sinks_N is a list; pass a torch tensor"),
        ({"sinks_N": torch.zeros(2)}, r"sinks_N is \(2,\) and q has 4 heads; pass one logit per query head"),
        ({"sinks_N": torch.zeros(1, 4)}, r"sinks_N is \(1, 4\) and q has 4 heads"),
        ({"sinks_N": torch.zeros(4, dtype=torch.int64)}, "sinks_N is torch.int64; pass a floating-point dtype"),
        ({"sinks_N": torch.zeros(4, device="meta")}, "sinks_N is on meta and q on cpu; move them to one device"),
    ],
)
def test_what_is_no_bound_and_no_logit_per_head_is_refused(choices, words) -> None:
    with pytest.raises(ValueError, match=words):
        burst_attention(Q, Q, Q, **choices)
    sinks = {"sinks_N": choices.pop("sinks_N")} if "sinks_N" in choices else {}
    with pytest.raises(ValueError, match=words):
        prepare_attention(Q, Q, **choices)(Q, Q, Q, **sinks)


@pytest.mark.parametrize("name", ["cpu", "fa2", "cudnn"])
def test_a_kernel_without_soft_capping_refuses_it_by_name(name) -> None:
    device = torch.device("cpu" if name == "cpu" else "cuda")
    dtype = torch.float32 if name == "cpu" else torch.bfloat16
    problem = KernelProblem(device=device, dtype=dtype, heads=4, kv_heads=4, head_dim=64, softcap=30.0)
    assert (kernel_named(name).refuse(problem) or "").startswith(
        f"kernel {name} is an operation of torch without soft-"
    )


def test_auto_takes_the_first_kernel_that_has_it() -> None:
    problem = KernelProblem(
        device=torch.device("cpu"), dtype=torch.float32, heads=4, kv_heads=4, head_dim=64, softcap=30.0
    )
    chosen = choose_kernel("auto", problem)
    assert (chosen.name, chosen.softcap) == ("reference", 30.0)
    assert kernel_named("reference").softcap is None
    assert set(KERNELS) == {"fa4", "cudnn", "fa2", "flex", "cpu", "reference"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: runs its kernels")
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("kernel", ["fa4", "cudnn", "fa2", "flex"])
def test_they_are_within_the_rounding_of_bf16_on_a_gpu(kernel, softcap) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, 512, heads, 128) for heads in (8, 2, 2, 8)]
    *shards, dout = (torch.randn(s, generator=generator, device="cuda").bfloat16() for s in shapes)
    sinks = torch.randn(8, generator=generator, device="cuda")
    leaves = [t.requires_grad_() for t in (*shards, sinks)]
    try:
        out = burst_attention(*leaves[:3], sinks_N=leaves[3], softcap=softcap, kernel=kernel)
    except ValueError as refused:
        pytest.skip(str(refused))
    results = (out, *torch.autograd.grad(out, leaves, dout))
    truths = dense_gradients(*leaves[:3], dout, Causal(), softcap=softcap, sinks_N=leaves[3])
    assert max(relative_errors(results, truths)) < 1.2e-2
