"""Sums of partial gradients of one shard, in fp32 or wider, and what of them has to cross a link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.accumulate.output import accumulation_dtype, rowwise_twins
from engine.attention.accumulate.spans import WAITING_PARTS, covered_spans
from engine.attention.accumulate.tensor_spec import TensorSpec


@dataclass(frozen=True, slots=True)
class _Part:
    tokens: slice
    gradient: Tensor
    release: Callable[[], None] | None  # the memory it lies in is someone's; tell them when it has been read


class GradAccumulator:
    """Sums partial gradients of a shard [B, tokens, heads, D] from kernel calls that each cover some of its tokens.

    Sums are formed in fp32 (float64 for float64 inputs), as late and as many at a time as memory allows. Parts that
    share no token are kept as the kernel wrote them: nothing was added, so they can cross a link in bf16 without
    rounding anything twice.

    Args:
        like: the shard the gradient is of.
        part_dtype: dtype in which a single kernel result crosses a link, the same on every rank.
    """

    def __init__(self, like: Tensor, part_dtype: torch.dtype) -> None:
        self._like, self._part_dtype = like, part_dtype
        self._wide = accumulation_dtype(like.dtype)
        self._parts: list[_Part] = []
        self._sum: Tensor | None = None

    def add(self, tokens: slice, gradient: Tensor, release: Callable[[], None] | None = None) -> None:
        """Add the gradient of local tokens `tokens`. Its memory is left alone until `release` is called."""
        room = WAITING_PARTS - (0 if self._sum is None else 2)
        if len(self._parts) == room:
            self.total()
        self._parts.append(_Part(tokens, gradient, release))

    def total(self) -> Tensor:
        """The sum so far, in the accumulation dtype: zeros where no part touched the shard. Owned by this object."""
        if self._parts or self._sum is None:
            self._sum = self._summed(self._wide)
        return self._sum

    def final(self, dtype: torch.dtype) -> Tensor:
        """The gradient of the whole shard in `dtype`. The last call on this object."""
        if self._is_one_part(slice(0, self._like.shape[1])):
            return self.over(slice(0, self._like.shape[1]), dtype, unreduced=True)
        return self._summed(dtype)

    def over(self, tokens: slice, wire: torch.dtype | None, unreduced: bool) -> Tensor:
        """The gradient of `tokens` as it crosses a link: as kernels wrote it, which parts that share no token allow, or
        as a sum wide; in `wire` if set. The last call on this object."""
        if not unreduced:
            return self.total()[:, tokens].to(wire or self._wide)
        if self._is_one_part(tokens):
            return self._parts[0].gradient.to(wire or self._part_dtype)
        return self._summed(wire or self._part_dtype)[:, tokens]

    def like(self, tokens: slice, wire: torch.dtype | None, unreduced: bool) -> TensorSpec:
        """What `over` of a peer gives with the same arguments."""
        batch, _, heads, head_dim = self._like.shape
        dtype = wire or (self._part_dtype if unreduced else self._wide)
        return TensorSpec((batch, tokens.stop - tokens.start, heads, head_dim), dtype)

    def _is_one_part(self, tokens: slice) -> bool:
        """One part that covers just these tokens, in memory of its own: one that waits in a receive slot is copied."""
        if self._sum is not None or len(self._parts) != 1:
            return False
        return self._parts[0].tokens == tokens and self._parts[0].release is None

    def _summed(self, dtype: torch.dtype) -> Tensor:
        """Running sum and waiting parts in one pass, in `dtype`; in place when that is the running sum's."""
        length = self._like.shape[1]
        ranges = [(part.tokens.start, part.tokens.stop) for part in self._parts]
        running = self._sum
        summed = (
            running
            if running is not None and running.dtype == dtype
            else self._like.new_empty(self._like.shape, dtype=dtype)
        )
        for start, stop, covering in covered_spans(length, ranges):
            sources = [self._parts[i].gradient[:, start - ranges[i][0] : stop - ranges[i][0]] for i in covering]
            if running is not None:
                if running is summed and not sources:
                    continue
                sources.insert(0, running[:, start:stop])
            add_parts(sources, into=summed[:, start:stop])
        for part in self._parts:
            if part.release is not None:
                part.release()
        self._parts = []
        return summed


def add_parts(parts: list[Tensor], into: Tensor) -> None:
    """into = the sum of `parts` [B, tokens, heads, D], formed in the accumulation dtype; zeros when there are none."""
    fused = rowwise_twins(into)
    if fused is not None and parts:
        fused.add_parts(parts, into)
        return
    wide = accumulation_dtype(into.dtype)
    total = torch.zeros(into.shape, dtype=wide, device=into.device)
    for part in parts:
        total += part
    into.copy_(total)
