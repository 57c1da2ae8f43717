"""Accumulators of attention: partial outputs merged, partial gradients summed, in fp32 (float64 for float64 inputs).

Partial outputs over disjoint keys combine exactly (online softmax, arXiv:1805.02867): with lse = log sum exp(lse_i),
out = sum exp(lse_i - lse) out_i. Formed from the largest lse down, nothing overflows. Both accumulators hold the parts
that kernels wrote and combine as many as memory allows in one pass. On a GPU that pass is a Triton kernel
(`engine.attention.accumulate.rowwise_triton`); the functions here are its reference implementation and run on a CPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.accumulate import WAITING_PARTS
from engine.cuda.alternate import ONE_STREAM, StreamPass
from engine.ops.autograd import accumulation_dtype, kernels_for

ROWWISE_KERNELS = "engine.attention.accumulate.rowwise_triton"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor that will be received."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_specs(tensors: tuple[Tensor, ...]) -> tuple[TensorSpec, ...]:
    """Specs of `tensors`: a peer that holds tensors of the same shapes sends these."""
    return tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def covered_spans(length: int, parts: Sequence[slice]) -> Iterator[tuple[slice, list[tuple[int, slice]]]]:
    """Rows [0, length) cut where a part starts or stops: the rows, and for each part that covers them its index and
    which of its own rows they are."""
    cuts = sorted({0, length, *(cut for part in parts for cut in (part.start, part.stop))})
    for start, stop in itertools.pairwise(cuts):
        yield (
            slice(start, stop),
            [
                (index, slice(start - part.start, stop - part.start))
                for index, part in enumerate(parts)
                if part.start <= start and stop <= part.stop
            ],
        )


def merge_parts(parts: list[tuple[Tensor, Tensor]], out_BLND: Tensor, lse_BNL: Tensor) -> None:
    """Write attention over the keys of all `parts` (out_BLND, lse_BNL) into `out_BLND`, `lse_BNL`.

    A row that sees no key in a part has lse = -inf and out = 0 there; so has the result where there are no parts. The
    result may share memory with a part of its own shape. Raises ValueError when a part covers a different number of
    rows.
    """
    for part_BLND, part_lse_BNL in parts:
        if part_BLND.shape != out_BLND.shape or part_lse_BNL.shape != lse_BNL.shape:
            raise ValueError(
                f"part of shape {tuple(part_BLND.shape)} does not fit rows of {tuple(out_BLND.shape)}; pass equal rows"
            )
    if not parts:
        out_BLND.zero_()
        lse_BNL.fill_(-torch.inf)
        return
    kernels = kernels_for(out_BLND, ROWWISE_KERNELS)
    if kernels is not None:
        kernels.merge_parts(parts, out_BLND, lse_BNL)
        return
    lses = torch.stack([lse.to(lse_BNL.dtype) for _, lse in parts])
    merged_BNL = lses.logsumexp(dim=0)
    blind_BNL = merged_BNL == -torch.inf
    weights = (lses - merged_BNL.masked_fill(blind_BNL, 0)).exp()
    out = sum(
        weight_BNL.transpose(1, 2).unsqueeze(-1) * part_BLND
        for weight_BNL, (part_BLND, _) in zip(weights, parts, strict=True)
    )
    out_BLND.copy_(out)
    lse_BNL.copy_(merged_BNL)


def row_dot(dout_BLND: Tensor, out_BLND: Tensor) -> Tensor:
    """delta_BNL = rowsum(dO * O), fp32 (float64 for float64 inputs)."""
    kernels = kernels_for(out_BLND, ROWWISE_KERNELS)
    if kernels is not None:
        delta_BNL: Tensor = kernels.row_dot(dout_BLND, out_BLND)
        return delta_BNL
    dtype = accumulation_dtype(out_BLND.dtype)
    return (dout_BLND.to(dtype) * out_BLND.to(dtype)).sum(dim=-1).transpose(1, 2).contiguous()


def add_parts(parts: list[Tensor], into: Tensor) -> None:
    """into = the sum of `parts` [B, tokens, heads, D], formed in the accumulation dtype; zeros when there are none."""
    kernels = kernels_for(into, ROWWISE_KERNELS)
    if kernels is not None and parts:
        kernels.add_parts(parts, into)
        return
    total = torch.zeros(into.shape, dtype=accumulation_dtype(into.dtype), device=into.device)
    for part in parts:
        total += part
    into.copy_(total)


@dataclass(frozen=True, slots=True)
class _OutputPart:
    rows: slice
    out_BLND: Tensor
    lse_BNL: Tensor


class OutputAccumulator:
    """The (out, LSE) pair of a rank's queries, merged from partial results as late and as many at a time as memory
    allows."""

    def __init__(self, q_BLND: Tensor, streams: StreamPass = ONE_STREAM, value_dim: int | None = None) -> None:
        """`streams`: those that parts are computed on, in turn; parts are merged on the one that is current then.
        `value_dim`: that of O, where it is not that of Q."""
        self._like_BLND, self._streams = q_BLND, streams
        self._shape = (*q_BLND.shape[:-1], value_dim or q_BLND.shape[-1])
        self._parts: list[_OutputPart] = []
        self._running: tuple[Tensor, Tensor] | None = None

    def update(self, rows: slice, part_BLND: Tensor, part_lse_BNL: Tensor) -> None:
        """Add attention of local query tokens `rows` over some keys."""
        room = WAITING_PARTS - (0 if self._running is None else 2)
        if len(self._parts) == room:
            self._streams.join()
            merged = self._parts
            self._running = self._merged(accumulation_dtype(self._like_BLND.dtype))
            self._streams.share(tensor for part in merged for tensor in (part.out_BLND, part.lse_BNL))
        self._parts.append(_OutputPart(rows, part_BLND, part_lse_BNL))

    def result(self) -> tuple[Tensor, Tensor]:
        """(out_BLND in the inputs' dtype, lse_BNL). Rows that see no key: out 0, lse -inf. The last call, on the
        caller's stream, which has waited for all parts."""
        result = self._result()
        self._streams.give(result)  # a part, or the running result, may be memory of another stream
        return result

    def _result(self) -> tuple[Tensor, Tensor]:
        like = self._like_BLND
        if self._running is None and len(self._parts) == 1 and self._parts[0].rows == slice(0, like.shape[1]):
            # One kernel call computed every row: its result is returned without another pass over memory.
            part = self._parts[0]
            return part.out_BLND.to(like.dtype).contiguous(), part.lse_BNL.contiguous()
        return self._merged(like.dtype)

    def _merged(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Running result and waiting parts in one pass, out in `dtype`; in place when that is the running one's."""
        like, running = self._like_BLND, self._running
        if running is None:
            out_BLND = torch.empty(self._shape, dtype=dtype, device=like.device)
            lse_shape = (like.shape[0], like.shape[2], like.shape[1])
            lse_BNL = torch.empty(lse_shape, dtype=accumulation_dtype(like.dtype), device=like.device)
        else:
            out_BLND = running[0] if running[0].dtype == dtype else torch.empty_like(running[0], dtype=dtype)
            lse_BNL = running[1]
        for rows, covering in covered_spans(like.shape[1], [part.rows for part in self._parts]):
            sources = [(self._parts[i].out_BLND[:, own], self._parts[i].lse_BNL[:, :, own]) for i, own in covering]
            if running is not None:
                if running[0] is out_BLND and not sources:
                    continue
                sources.insert(0, (running[0][:, rows], running[1][:, :, rows]))
            merge_parts(sources, out_BLND[:, rows], lse_BNL[:, :, rows])
        self._parts = []
        return out_BLND, lse_BNL


@dataclass(frozen=True, slots=True)
class _GradPart:
    tokens: slice
    gradient: Tensor
    release: Callable[[], None] | None  # called once the part has been read: its memory is a receive slot


class GradAccumulator:
    """Sum of partial gradients of a shard [B, tokens, heads, D], each of one kernel call over some of its tokens.

    Sums are formed in fp32 (float64 for float64 inputs), as late and as many at a time as memory allows. Parts that
    share no token are kept as the kernel wrote them and can be sent in bf16 without a second rounding.

    Args:
        like: the shard that the gradient belongs to.
        part_dtype: dtype in which a single kernel result is sent, the same on every rank.
    """

    def __init__(self, like: Tensor, part_dtype: torch.dtype) -> None:
        self._like, self._part_dtype = like, part_dtype
        self._parts: list[_GradPart] = []
        self._sum: Tensor | None = None

    def add(self, tokens: slice, gradient: Tensor, release: Callable[[], None] | None = None) -> None:
        """Add the gradient of local tokens `tokens`. Its memory stays in use until `release` is called."""
        room = WAITING_PARTS - (0 if self._sum is None else 2)
        if len(self._parts) == room:
            self.total()
        self._parts.append(_GradPart(tokens, gradient, release))

    def total(self) -> Tensor:
        """The sum so far, in the accumulation dtype: zeros where no part touched the shard. Owned by this object; a
        caller that sends it on may add to it in place, and must not call this again afterwards."""
        if self._parts or self._sum is None:
            self._sum = self._summed(accumulation_dtype(self._like.dtype))
        return self._sum

    def final(self, dtype: torch.dtype) -> Tensor:
        """The gradient of the whole shard in `dtype`. The last call on this object."""
        whole = slice(0, self._like.shape[1])
        if self._is_one_part(whole):
            return self.over(whole, dtype, unreduced=True)
        return self._summed(dtype)

    def over(self, tokens: slice, comm_dtype: torch.dtype | None, unreduced: bool) -> Tensor:
        """The gradient of `tokens` as it is sent, in `comm_dtype` if set. The last call on this object.

        `unreduced`: as kernels wrote it, possible where the parts share no token; else a sum in the accumulation dtype.
        """
        if not unreduced:
            return self.total()[:, tokens].to(comm_dtype or accumulation_dtype(self._like.dtype))
        if self._is_one_part(tokens):
            return self._parts[0].gradient.to(comm_dtype or self._part_dtype)
        return self._summed(comm_dtype or self._part_dtype)[:, tokens]

    def spec(self, tokens: slice, comm_dtype: torch.dtype | None, unreduced: bool) -> TensorSpec:
        """Shape and dtype of the tensor that a peer's `over` returns with the same arguments."""
        batch, _, heads, head_dim = self._like.shape
        dtype = comm_dtype or (self._part_dtype if unreduced else accumulation_dtype(self._like.dtype))
        return TensorSpec((batch, tokens.stop - tokens.start, heads, head_dim), dtype)

    def _is_one_part(self, tokens: slice) -> bool:
        """One part covers just these tokens, in memory of its own: a part in a receive slot has to be copied."""
        if self._sum is not None or len(self._parts) != 1:
            return False
        return self._parts[0].tokens == tokens and self._parts[0].release is None

    def _summed(self, dtype: torch.dtype) -> Tensor:
        """Running sum and waiting parts in one pass, in `dtype`; in place when that is the running sum's."""
        like, running = self._like, self._sum
        in_place = running is not None and running.dtype == dtype
        summed = running if running is not None and in_place else like.new_empty(like.shape, dtype=dtype)
        for tokens, covering in covered_spans(like.shape[1], [part.tokens for part in self._parts]):
            sources = [self._parts[i].gradient[:, own] for i, own in covering]
            if running is not None:
                if in_place and not sources:
                    continue
                sources.insert(0, running[:, tokens])
            add_parts(sources, into=summed[:, tokens])
        for part in self._parts:
            if part.release is not None:
                part.release()
        self._parts = []
        return summed
