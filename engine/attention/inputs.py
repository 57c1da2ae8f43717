"""Checks of attention's arguments, before any rank waits for another: each raises ValueError.

Strides are not refused: `engine.attention.op.laid_out` copies tensors that a kernel could not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, TypeAlias

from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.forward_ad import unpack_dual
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from engine.settings import WIDEST_HEAD_DIM

Result: TypeAlias = Tensor | tuple[Tensor, Tensor]  # out_BLND, or with `return_lse` (out_BLND, lse_BNL)
LAYOUTS = {  # by name, the dimensions of q
    "BSHD": "[batch, tokens, heads, head_dim]",
    "BHSD": "[batch, heads, tokens, head_dim]",
    "THD": "[tokens, heads, head_dim]",
}


def to_bshd(tensors: Sequence[Tensor], layout: str) -> list[Tensor]:
    """Views [batch, tokens, heads, head_dim] of q, k and perhaps v in `layout`. Raises ValueError where they cannot
    be."""
    if layout not in LAYOUTS:
        raise ValueError(f"tensor_layout {layout!r} is unknown; choose BSHD, BHSD or THD")
    if any(tensor.ndim != (3 if layout == "THD" else 4) for tensor in tensors):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in zip("qkv", tensors, strict=False))
        raise ValueError(f"tensor_layout {layout} needs {LAYOUTS[layout]}, found {shapes}; reshape them")
    if layout == "THD":
        return [tensor.unsqueeze(0) for tensor in tensors]
    return [tensor.transpose(1, 2) for tensor in tensors] if layout == "BHSD" else list(tensors)


def from_bshd(found: Result, layout: str) -> Result:
    """The out_BLND, or (out_BLND, lse_BNL), of a call as views in `layout`; without a batch the lse has none."""
    if layout == "BSHD":
        return found
    if isinstance(found, Tensor):
        return found.squeeze(0) if layout == "THD" else found.transpose(1, 2)
    out_BLND, lse_BNL = found
    if layout == "THD":
        return out_BLND.squeeze(0), lse_BNL.squeeze(0)
    return out_BLND.transpose(1, 2), lse_BNL


def looks_transposed(q: Tensor) -> bool:
    """Whether a tensor given without a layout has fewer tokens than heads, or a head_dim that no GPU has a kernel for:
    rarely meant, and then said by name."""
    return q.ndim != 4 or 0 < q.shape[1] < q.shape[2] or q.shape[3] > WIDEST_HEAD_DIM


def refuse_unnamed_layout(q: Tensor) -> NoReturn:
    """Raise the ValueError of a tensor that `looks_transposed`."""
    if q.ndim != 4:
        raise ValueError(
            f"q {tuple(q.shape)}: q, k and v are not [batch, tokens, heads, head_dim]; reshape them, or give "
            'tensor_layout="THD" for [tokens, heads, head_dim]'
        )
    _, tokens, heads, head_dim = q.shape
    found = (
        f"{tokens} tokens with {heads} heads" if heads > tokens else f"head_dim {head_dim}, which no GPU kernel takes"
    )
    raise ValueError(
        f'q {tuple(q.shape)} as [batch, tokens, heads, head_dim] has {found}; give tensor_layout="BHSD" where heads '
        'come before tokens, or tensor_layout="BSHD" where this is meant'
    )


def check_tensors(*tensors: object) -> None:
    """Raise ValueError unless q, k and perhaps v are dense tensors of torch."""
    names = ", ".join("qkv"[: len(tensors)])
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ValueError(f"{names} are {', '.join(type(each).__name__ for each in tensors)}; pass torch tensors")
    layouts = [str(tensor.layout) for tensor in tensors if isinstance(tensor, Tensor)]
    if set(layouts) != {"torch.strided"}:
        raise ValueError(f"{names} are {', '.join(layouts)}; pass dense tensors")


def check_sent(*tensors: Tensor | None) -> None:
    """Raise ValueError for tensors that other ranks cannot be sent: their memory is elsewhere, or a transform of torch
    follows them, which does not see what ranks send."""
    given = [tensor for tensor in tensors if tensor is not None]
    if wrappers := sorted({type(tensor).__name__ for tensor in given if is_traceable_wrapper_subclass(tensor)}):
        raise ValueError(
            f"{', '.join(wrappers)} is a tensor around others, and ranks send plain ones; pass this rank's tokens by "
            "to_local() of a DTensor, or wait() of an AsyncCollectiveTensor"
        )
    if any(is_functorch_wrapped_tensor(tensor) or unpack_dual(tensor).tangent is not None for tensor in given):
        raise ValueError(
            "a tensor is in a transform of torch.func or has a tangent of forward-mode differentiation, which do not "
            "follow what ranks send; call attention outside of it, and differentiate by backward or torch.autograd.grad"
        )


def check_inputs(q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, expand_NXC: Tensor | None = None) -> None:
    """Raise ValueError unless these are shards of the same positions, with heads that fit, of one kind. The head dim
    of V may be its own. With `expand_NXC` K and V are a shared key and a latent of one head."""
    check_tensors(q_BLND, k_BLKD, v_BLKD)
    if q_BLND.ndim != 4 or k_BLKD.ndim != 4 or k_BLKD.shape[:-1] != v_BLKD.shape[:-1]:
        raise ValueError(
            f"q {tuple(q_BLND.shape)}, k {tuple(k_BLKD.shape)}, v {tuple(v_BLKD.shape)} are not [batch, tokens, heads, "
            "head_dim] with k and v equal but for head_dim; reshape them"
        )
    if 0 in (*q_BLND.shape, *k_BLKD.shape, v_BLKD.shape[-1]):
        raise ValueError(
            f"q {tuple(q_BLND.shape)}, k {tuple(k_BLKD.shape)} or v {tuple(v_BLKD.shape)} is empty; pass at least one "
            "sequence, token and head"
        )
    batch, tokens, heads, head_dim = q_BLND.shape
    if expand_NXC is not None:
        _check_latent(q_BLND, k_BLKD, v_BLKD, expand_NXC)
        head_dim = k_BLKD.shape[3]
    if (batch, tokens, head_dim) != (k_BLKD.shape[0], k_BLKD.shape[1], k_BLKD.shape[3]):
        raise ValueError(
            f"q {tuple(q_BLND.shape)} and k {tuple(k_BLKD.shape)} differ in batch, tokens or head_dim; pass shards of "
            'the same positions; where heads come before tokens, give tensor_layout="BHSD", and where v is a latent, '
            "expand_NXC"
        )
    if heads % k_BLKD.shape[2]:
        raise ValueError(f"{heads} query heads are not divisible by {k_BLKD.shape[2]} KV heads; choose heads that are")
    if not q_BLND.dtype == k_BLKD.dtype == v_BLKD.dtype:
        raise ValueError(f"q, k, v are {q_BLND.dtype}, {k_BLKD.dtype}, {v_BLKD.dtype}; pass one dtype")
    if not q_BLND.dtype.is_floating_point:
        raise ValueError(f"q, k, v are {q_BLND.dtype}; pass a floating-point dtype")
    if not q_BLND.device == k_BLKD.device == v_BLKD.device:
        raise ValueError(f"q, k, v are on {q_BLND.device}, {k_BLKD.device}, {v_BLKD.device}; move them to one device")


def _check_latent(q_BLND: Tensor, shared_BLKR: Tensor, latent_BLKC: Tensor, expand_NXC: Tensor) -> None:
    """Raise ValueError unless these form K and V of q's heads: see `engine.attention.algorithms.latent`."""
    check_tensors(q_BLND, shared_BLKR, latent_BLKC)
    if not isinstance(expand_NXC, Tensor) or expand_NXC.ndim != 3:
        found = tuple(expand_NXC.shape) if isinstance(expand_NXC, Tensor) else type(expand_NXC).__name__
        raise ValueError(
            f"expand_NXC is {found}; pass a torch tensor [query heads, dims of K and V, dims of the latent]"
        )
    (heads, head_dim), (_, width, latent) = q_BLND.shape[2:], expand_NXC.shape
    formed = head_dim - shared_BLKR.shape[-1]
    if shared_BLKR.shape[2] != 1 or expand_NXC.shape[0] != heads or latent != latent_BLKC.shape[-1]:
        raise ValueError(
            f"expand_NXC {tuple(expand_NXC.shape)} does not form K and V of {heads} query heads from shared key "
            f"{tuple(shared_BLKR.shape)} and latent {tuple(latent_BLKC.shape)}; pass both with one head, and a matrix "
            f"[{heads}, dims of K and V, {latent_BLKC.shape[-1]}]"
        )
    if not 0 < formed < width:
        raise ValueError(
            f"q has head_dim {head_dim}, the shared key {shared_BLKR.shape[-1]} and expand_NXC {width} dims a head; "
            "pass a shared key narrower than q, and a matrix with more dims than the rest of q"
        )
    if expand_NXC.dtype != q_BLND.dtype or expand_NXC.device != q_BLND.device:
        raise ValueError(
            f"expand_NXC is {expand_NXC.dtype} on {expand_NXC.device} and q {q_BLND.dtype} on {q_BLND.device}; "
            "make them alike"
        )


def check_sinks(sinks_N: object, q_BLND: Tensor) -> None:
    """Raise ValueError unless `sinks_N` has one floating-point logit per query head, on the device of q."""
    if not isinstance(sinks_N, Tensor):
        raise ValueError(f"sinks_N is a {type(sinks_N).__name__}; pass a torch tensor of one logit per query head")
    heads = q_BLND.shape[2]
    if sinks_N.shape != (heads,):
        raise ValueError(f"sinks_N is {tuple(sinks_N.shape)} and q has {heads} heads; pass one logit per query head")
    if not sinks_N.dtype.is_floating_point:
        raise ValueError(f"sinks_N is {sinks_N.dtype}; pass a floating-point dtype")
    if sinks_N.device != q_BLND.device:
        raise ValueError(f"sinks_N is on {sinks_N.device} and q on {q_BLND.device}; move them to one device")
