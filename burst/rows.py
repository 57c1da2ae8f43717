"""Attention over a batch whose rows hold packed documents of their own: one call where all rows have the same ones.

Shape letters: B batch, L this rank's tokens, N heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from engine.attention.masks import Causal, Documents, Full, Mask, SlidingWindow

Rows: TypeAlias = tuple[tuple[int, ...], ...]  # lengths of the documents in each row of a batch


def by_rows(call: Callable[[slice, tuple[int, ...]], Tensor], rows: Sequence[tuple[int, ...]]) -> Tensor:
    """The results of `call(rows of the batch, lengths of their documents)`, joined along the batch."""
    if len(set(rows)) == 1:
        return call(slice(None), rows[0])
    return torch.cat([call(slice(row, row + 1), lengths) for row, lengths in enumerate(rows)])


def mask_of(lengths: tuple[int, ...], *, causal: bool, left: int | None) -> Mask:
    """The mask of documents of these lengths in which a token sees `left` tokens before itself; None for no limit.
    Raises ValueError for a window of attention that is not causal."""
    if left is not None and not causal:
        raise ValueError("the model asks for a window to both sides; only causal windows are exact here")
    if len(lengths) > 1:
        return Documents(lengths, causal=causal, left=left)
    if left is not None and left < lengths[0] - 1:
        return SlidingWindow(left)
    return Causal() if causal else Full()
