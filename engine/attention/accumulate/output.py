"""Folding partial attention results together, and the row sums the backward needs: torch forms and their fused twins.

Partial results over disjoint keys combine exactly (online softmax, arXiv:1805.02867): with lse = log sum exp(lse_i),
out = sum exp(lse_i - lse) out_i. Formed from the largest lse down, nothing overflows. On a GPU a Triton kernel does it
in one pass over memory (`engine.attention.accumulate.rowwise_triton`); the torch form is its oracle and the CPU's path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention.accumulate.spans import WAITING_PARTS, covered_spans


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rowwise_twins(tensor: Tensor) -> Any:
    """The Triton twins when `tensor` is theirs to handle, else None."""
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return None
    from engine.attention.accumulate import rowwise_triton

    return rowwise_triton


def merge_parts(parts: list[tuple[Tensor, Tensor]], out_BLND: Tensor, lse_BNL: Tensor) -> None:
    """Write attention over the keys of all `parts` (out_BLND, lse_BNL) into `out_BLND`, `lse_BNL`.

    A part's row that has met no key has lse = -inf and out = 0; so has the result where there are no parts. The result
    may share memory with a part of its own shape. Raises ValueError when a part covers a different number of rows.
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
    fused = rowwise_twins(out_BLND)
    if fused is not None:
        fused.merge_parts(parts, out_BLND, lse_BNL)
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
    fused = rowwise_twins(out_BLND)
    if fused is not None:
        delta_BNL: Tensor = fused.row_dot(dout_BLND, out_BLND)
        return delta_BNL
    wide = accumulation_dtype(out_BLND.dtype)
    return (dout_BLND.to(wide) * out_BLND.to(wide)).sum(dim=-1).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class _Part:
    rows: slice
    out_BLND: Tensor
    lse_BNL: Tensor


class OutputAccumulator:
    """The (out, lse) pair a rank builds up over the hops of a ring, merged as late and as many at a time as memory
    allows."""

    def __init__(self, q_BLND: Tensor) -> None:
        self._like_BLND = q_BLND
        self._parts: list[_Part] = []
        self._running: tuple[Tensor, Tensor] | None = None

    def fold(self, rows: slice, part_BLND: Tensor, part_lse_BNL: Tensor) -> None:
        """Fold in a part computed for local query tokens `rows`."""
        room = WAITING_PARTS - (0 if self._running is None else 2)
        if len(self._parts) == room:
            self._running = self._merged(accumulation_dtype(self._like_BLND.dtype))
        self._parts.append(_Part(rows, part_BLND, part_lse_BNL))

    def result(self) -> tuple[Tensor, Tensor]:
        """(out_BLND in the inputs' dtype, lse_BNL). Rows that met no key: out 0, lse -inf. The last call."""
        like = self._like_BLND
        if self._running is None and len(self._parts) == 1 and self._parts[0].rows == slice(0, like.shape[1]):
            # As the kernel wrote it: a ring of one pays for no pass at all.
            part = self._parts[0]
            return part.out_BLND.to(like.dtype).contiguous(), part.lse_BNL.contiguous()
        return self._merged(like.dtype)

    def _merged(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Running result and waiting parts in one pass, out in `dtype`; in place when that is the running one's."""
        like, running = self._like_BLND, self._running
        wide = accumulation_dtype(like.dtype)
        if running is None:
            out_BLND = torch.empty(like.shape, dtype=dtype, device=like.device)
            lse_BNL = torch.empty(like.shape[0], like.shape[2], like.shape[1], dtype=wide, device=like.device)
        else:
            out_BLND = running[0] if running[0].dtype == dtype else torch.empty_like(running[0], dtype=dtype)
            lse_BNL = running[1]
        ranges = [(part.rows.start, part.rows.stop) for part in self._parts]
        for start, stop, covering in covered_spans(like.shape[1], ranges):
            rows = slice(start, stop)
            sources = [
                (
                    self._parts[i].out_BLND[:, start - ranges[i][0] : stop - ranges[i][0]],
                    self._parts[i].lse_BNL[:, :, start - ranges[i][0] : stop - ranges[i][0]],
                )
                for i in covering
            ]
            if running is not None:
                if running[0] is out_BLND and not sources:
                    continue
                sources.insert(0, (running[0][:, rows], running[1][:, :, rows]))
            merge_parts(sources, out_BLND[:, rows], lse_BNL[:, :, rows])
        self._parts = []
        return out_BLND, lse_BNL
