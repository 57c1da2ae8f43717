"""Tensors of any strides give what their contiguous copies give, forward and backward, whatever the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine import ContextParallel, burst_attention, prepare_attention
from engine.attention.algorithms.saved import save_suffix
from engine.attention.kernels import KERNELS, KernelProblem, kernel_named, unsupported_reason
from engine.attention.masks import Causal, Full, Mask, SlidingWindow
from engine.attention.op import ALIGNMENT_BYTES, laid_out
from tests.ranks import run_on_ranks
from tests.slow import slow

DEVICE = torch.device("cpu")  # a test marked gpu sets another
TOKENS, HEADS, HEAD_DIM = 16, 2, 16
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def every_other(plain: Tensor) -> Tensor:
    return torch.stack([plain, plain * 0 + 7], -1).flatten(-2)[..., ::2]


def head_dim_first(plain: Tensor) -> Tensor:
    return plain.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)


def heads_first(plain: Tensor) -> Tensor:
    return plain.transpose(1, 2).contiguous().transpose(1, 2)


def tokens_first(plain: Tensor) -> Tensor:
    return plain.transpose(0, 1).contiguous().transpose(0, 1)


def cut_of_wider_rows(plain: Tensor) -> Tensor:
    return torch.nn.functional.pad(plain, (1, 2))[..., 1:-2]


def behind_one_value(plain: Tensor) -> Tensor:
    return torch.cat((plain.new_zeros(1), plain.flatten()))[1:].view(plain.shape)


def one_head_for_all(plain: Tensor) -> Tensor:
    return plain[:, :, :1].expand(plain.shape)


def one_token_for_all(plain: Tensor) -> Tensor:
    return plain[:, :1].expand(plain.shape)


def one_value_for_all(plain: Tensor) -> Tensor:
    return plain[:1, :1, :1, :1].expand(plain.shape)


VIEWS: list[Callable[[Tensor], Tensor]] = [
    every_other,
    head_dim_first,
    heads_first,
    tokens_first,
    cut_of_wider_rows,
    behind_one_value,
    one_head_for_all,
    one_token_for_all,
    one_value_for_all,
]


def whole(dtype: torch.dtype, heads: int = HEADS) -> list[Tensor]:
    """q, k, v, and the gradients of out and, [B, L, N, 1], of the LSE."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, TOKENS, heads, HEAD_DIM)] * 4 + [(2, TOKENS, heads, 1)]
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


def results(tensors: list[Tensor], mask: Mask, cp: ContextParallel, **choices: object) -> list[Tensor]:
    """out, lse, dq, dk, dv, with both outputs' gradients in the strides given."""
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    dout, dlse = tensors[3], tensors[4].squeeze(-1).transpose(1, 2)
    out, lse = burst_attention(q, k, v, mask=mask, cp=cp, return_lse=True, **choices)
    return [out, lse, *torch.autograd.grad((out, lse), (q, k, v), (dout, dlse.to(lse.dtype)))]


def differing(
    view: Callable[[Tensor], Tensor], dtype: torch.dtype, kernel: str, routes: tuple[str, ...] = ("auto",)
) -> list[str]:
    """The cases of this rank in which strides change a result."""
    cp, wrong = ContextParallel(), []
    for mask in (Full(), Causal(), SlidingWindow(5)):
        for backward in routes:
            strided = [view(cp.shard(t)) for t in whole(dtype)]
            packed = [t.clone(memory_format=torch.contiguous_format) for t in strided]
            found, expected = (results(t, mask, cp, kernel=kernel, backward=backward) for t in (strided, packed))
            tolerance = TOLERANCES[dtype]  # matmuls add in an order that may depend on strides
            if not all(torch.allclose(f, e, tolerance, tolerance) for f, e in zip(found, expected, strict=True)):
                wrong.append(f"{mask} {backward}")
    return wrong


@pytest.mark.parametrize("kernel", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_strides_change_nothing(view, dtype, kernel) -> None:
    assert differing(view, dtype, kernel) == []


def differing_views() -> list[str]:
    routes = ("query", "key_value")
    return [f"{view.__name__} {case}" for view in VIEWS for case in differing(view, torch.float32, "cpu", routes)]


def test_strides_do_not_change_sent_shards() -> None:
    assert run_on_ranks(2, differing_views) == [[], []]


TO_LAYOUT: dict[str, Callable[[Tensor], Tensor]] = {
    "BSHD": lambda t: t,
    "BHSD": lambda t: t.transpose(1, 2).contiguous(),
    "THD": lambda t: t.squeeze(0),
}
FROM_LAYOUT: dict[str, Callable[[Tensor], Tensor]] = TO_LAYOUT | {"THD": lambda t: t.unsqueeze(0)}


def differing_layouts(schedule: str) -> list[str]:
    """The calls of this rank that give other bits than those of [batch, tokens, heads, head_dim], by layout and way."""
    cp, wrong = ContextParallel(node_size=1), []
    for layout, batch in (("BSHD", 2), ("BHSD", 2), ("THD", 1)):
        tensors = [cp.shard(t)[:batch].contiguous() for t in whole(torch.float32)[:4]]

        def expected(choose: Callable[..., object], tensors: list[Tensor] = tensors) -> list[Tensor]:
            leaves = [t.clone().requires_grad_() for t in tensors[:3]]
            out, lse = choose(*leaves)
            return [out, lse, *torch.autograd.grad((out * tensors[3]).sum() + lse.sum(), leaves)]

        def through(call: Callable[..., object], layout: str = layout) -> Callable[..., tuple[Tensor, Tensor]]:
            def converted(*shards: Tensor) -> tuple[Tensor, Tensor]:
                out, lse = call(*map(TO_LAYOUT[layout], shards))
                assert out.shape == TO_LAYOUT[layout](shards[0]).shape
                return FROM_LAYOUT[layout](out), lse.unsqueeze(0) if layout == "THD" else lse

            return converted

        choices = {"cp": cp, "schedule": schedule, "return_lse": True, "recompute": True}
        truth = expected(lambda *t, c=choices: burst_attention(*t, **c))
        named = choices | {"tensor_layout": layout}
        attend = prepare_attention(*(TO_LAYOUT[layout](t) for t in tensors[:2]), **named)
        ways = {
            "call": lambda *t, c=named: burst_attention(*t, **c),
            "prepared": lambda *t, a=attend: a(*t),
        }
        for name, call in ways.items():
            found = expected(through(call))
            if not all(torch.equal(f, t) for f, t in zip(found, truth, strict=True)):
                wrong.append(f"{layout} {name}")
        whole_again = [TO_LAYOUT[layout](t) for t in tensors[:3]]
        out, lse = burst_attention(*whole_again, **named)
        saved = save_suffix(out, lse, cp, 0.5, tensor_layout=layout)
        again, _ = burst_attention(*whole_again, saved=saved, **named)
        if not torch.allclose(again, out, atol=1e-6):
            wrong.append(f"{layout} saved")
    return wrong


@pytest.mark.parametrize("schedule", ["ring", "ulysses", *slow("double_ring", "all_gather")])
def test_a_layout_by_name_gives_the_bits_of_the_default_one(schedule) -> None:
    assert run_on_ranks(2, differing_layouts, schedule) == [[], []]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: runs its kernels")
@pytest.mark.parametrize("kernel", [name for name in KERNELS if name != "cpu"])
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_strides_change_nothing_that_is_above_rounding_on_a_gpu(monkeypatch, view, mask, kernel) -> None:
    monkeypatch.setitem(globals(), "DEVICE", torch.device("cuda"))
    problem = KernelProblem(device=DEVICE, dtype=torch.bfloat16, heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM)
    reason = unsupported_reason(kernel_named(kernel), problem)
    if reason:
        pytest.skip(reason)
    strided = [view(t) for t in whole(torch.bfloat16)]
    packed = [t.clone(memory_format=torch.contiguous_format) for t in strided]
    found, expected = (results(t, mask, ContextParallel.single(), kernel=kernel) for t in (strided, packed))
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f.float(), e.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("used", ["sum", "mean of one head", "lse"])
def test_gradients_that_autograd_expands_are_taken(used) -> None:
    loss = {
        "sum": lambda out, lse: out.sum(),
        "mean of one head": lambda out, lse: out[:, :, 0].mean(),
        "lse": lambda out, lse: lse.sum(),
    }[used]
    gradients = []
    for kernel in ("cpu", "reference"):
        q, k, v = (t.double().requires_grad_() for t in whole(torch.float32)[:3])
        out, lse = burst_attention(q, k, v, kernel=kernel, return_lse=True)
        gradients.append(torch.autograd.grad(loss(out, lse), (q, k, v)))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("view", [heads_first, tokens_first], ids=lambda view: view.__name__)
def test_a_tensor_that_kernels_can_read_is_not_copied(view) -> None:
    plain = torch.zeros(2, 8, 4, 16)
    assert laid_out(plain) is plain
    strided = view(plain)
    assert laid_out(strided) is strided
    fused = torch.zeros(2, 8, 12, 16)[:, :, 4:8]  # of one projection for q, k and v
    assert laid_out(fused) is fused


@pytest.mark.parametrize("view", [view for view in VIEWS if view not in (heads_first, tokens_first)])
def test_a_copied_tensor_has_rows_that_any_kernel_reads(view) -> None:
    strided = view(torch.randn(2, 8, 4, 16))
    rows = laid_out(strided)
    assert torch.equal(rows, strided)
    assert rows.is_contiguous()
    assert rows.data_ptr() % ALIGNMENT_BYTES == 0


def test_a_leaf_of_odd_strides_gets_its_gradient() -> None:
    q, k, v, *_ = whole(torch.float32)
    leaf = every_other(q).detach().requires_grad_()
    burst_attention(leaf, k, v).square().sum().backward()
    expected = q.clone().requires_grad_()
    burst_attention(expected, k, v).square().sum().backward()
    assert torch.equal(leaf.grad, expected.grad)
