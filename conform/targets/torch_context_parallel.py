"""torch's own context parallelism: its ring in two layouts, its public call, and its flexible attention with keys
gathered.

The public `context_parallel` replaces scaled dot-product attention on GPUs alone, so `public` runs there. The ring
below it takes the attention of one block as an argument, here torch's for CPUs; it has no grouped heads. `flex` is
the parallel style that torchtitan 0.3 uses, with a block mask of the whole sequence.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from conform.flexible import allow_cpu, blocks_of
from conform.positions import positions_of, put_together, take
from conform.target import CaseProblem, variant_of

VARIANTS = ("zigzag", "contiguous", "flex", "public")
VARIANT = variant_of(__name__, VARIANTS)
NAME = "torch context_parallel, " + {"flex": "flex", "public": "the public call"}.get(VARIANT, f"{VARIANT} ring")
RANKS = (2, 4, 8)
DEVICES = ("cuda",) if VARIANT == "public" else ("cpu",)
_OF_VARIANT: dict[str, tuple[str, ...]] = {
    "zigzag": (),
    "public": (),
    "contiguous": ("full",),
    "flex": ("full", "documents", "window", "grouped_heads", "few_kv_heads", "softcap", "fp64"),
}
CAPABILITIES = ("causal", "batch", "bf16", "frozen", "two_models", "scale", *_OF_VARIANT[VARIANT])
_LAYOUT = "contiguous" if VARIANT == "contiguous" else "zigzag"


def VERSION() -> str:
    return torch.__version__


def _ring() -> Any:
    ring = importlib.import_module("torch.distributed.tensor.experimental._context_parallel._attention")
    ring._cp_options.enable_load_balance = VARIANT == "zigzag"
    ring.set_rotate_method("alltoall")  # K and V from neighbour to neighbour; its default gathers all of them
    return ring


def _positions(problem: CaseProblem) -> list[Tensor]:
    return [positions_of(_LAYOUT, problem.tokens, rank, problem.ranks) for rank in range(problem.ranks)]


def shard(whole: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return take(whole, dim, _positions(problem)[problem.rank])


class _RingFunction(torch.autograd.Function):
    """(q, k, v as [B, heads, tokens, D], whether causal, scale, group) -> out."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, group: Any) -> Tensor:
        def block(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **_: Any) -> Any:
            attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            return attend(query, key, value, 0.0, is_causal, scale=scale)

        out, lse, *_ = _ring()._templated_ring_attention(group, 2, block, q, k, v, is_causal=causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.asked = causal, scale, group
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        causal, scale, group = ctx.asked

        def block(
            grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
            is_causal: bool = False, **_: Any,
        ) -> Any:  # fmt: skip
            attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            return attend(grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=scale)

        q, k, v, out, lse = ctx.saved_tensors
        found = _ring()._templated_ring_attention_backward(
            group, 2, block, dout.contiguous(), "grad_out", q, k, v, out, lse, is_causal=causal
        )
        return *found[:3], None, None, None


@contextmanager
def _public(ranks: int, shard_tokens: int) -> Iterator[None]:
    """The public context, with kernels that take each dtype. It wants a whole tensor to divide, of any content."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    whole = torch.empty(ranks * shard_tokens, device="cuda")
    with (
        context_parallel(_gpus(ranks), buffers=[whole], buffer_seq_dims=[0]),
        sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]),
    ):
        yield


@lru_cache
def _gpus(ranks: int) -> DeviceMesh:
    return init_device_mesh("cuda", (ranks,))


class _PublicFunction(torch.autograd.Function):
    """(q, k, v as [B, heads, tokens, D], whether causal, scale, ranks) -> out. The context replaces backward too, so
    that runs inside it as well."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, ranks: int) -> Tensor:
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        with torch.enable_grad(), _public(ranks, q.shape[2]):
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale)
        ctx.leaves, ctx.out, ctx.ranks = leaves, out, ranks
        return out.detach()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        with _public(ctx.ranks, dout.shape[2]):
            found = torch.autograd.grad(ctx.out, ctx.leaves, dout.contiguous())
        return *found, None, None, None


class _Flexible(torch.nn.Module):
    """Attention that torch's parallel style is applied to."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(query, key, value, **settings)


@lru_cache
def _flexible(ranks: int) -> tuple[Any, Any]:
    """The module with its keys gathered, and the ranks as torch names them."""
    allow_cpu()
    mesh, style = init_device_mesh("cpu", (ranks,)), _ring()._ContextParallel
    return style(seq_dim=2, attention_type=style.AttentionType.FLEX)._apply(_Flexible(), mesh), mesh


@lru_cache
def _block_mask(tokens: int, documents: tuple[int, ...], window: int | None, mask: str, ranks: int) -> Any:
    """This rank's rows of the mask."""
    from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer
    from torch.nn.attention.flex_attention import create_block_mask

    document = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        found = document[q] == document[k]
        found = found & (k <= q) if mask == "causal" else found
        return found if window is None else found & (q - k <= window)

    block = tokens // (2 * ranks)
    whole = create_block_mask(visible, None, None, tokens, tokens, device="cpu", BLOCK_SIZE=block)
    _, mesh = _flexible(ranks)
    with blocks_of(block, _ring()):
        (own,) = _ring()._context_parallel_shard(
            mesh=mesh, buffers=[whole], seq_dims=(2,), load_balancer=_HeadTailLoadBalancer(tokens, ranks, "cpu")
        )
    return own


def attention(q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, problem: CaseProblem) -> Tensor:
    q, k, v = (each.transpose(1, 2).contiguous() for each in (q_BLND, k_BLKD, v_BLKD))
    causal = problem.mask == "causal"
    if VARIANT == "public":
        public: Tensor = _PublicFunction.apply(q, k, v, causal, problem.scale, problem.ranks)
        return public.transpose(1, 2)
    if VARIANT != "flex":
        out: Tensor = _RingFunction.apply(q, k, v, causal, problem.scale, problem.group)
        return out.transpose(1, 2)
    lengths, cap = problem.documents or (problem.tokens,), problem.softcap

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap) if cap else score

    positions_of(_LAYOUT, problem.tokens, problem.rank, problem.ranks)
    module, _ = _flexible(problem.ranks)
    out = module(
        q, k, v, block_mask=_block_mask(problem.tokens, lengths, problem.window, problem.mask, problem.ranks),
        scale=problem.scale, enable_gqa=problem.heads != problem.kv_heads, score_mod=capped if cap else None,
    )  # fmt: skip
    return out.transpose(1, 2)


def gather(part: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return put_together(part, dim, _positions(problem), problem)
