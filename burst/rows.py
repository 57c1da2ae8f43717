"""What adapters of models share: the parts of composed mask functions, masks of packed documents, and attention over a
batch whose rows hold documents of their own. It is one call where all rows have the same documents.

Shape letters: B batch, L this rank's tokens, N heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
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


def mask_of_lengths(lengths: tuple[int, ...], *, causal: bool, left: int | None) -> Mask:
    """The mask of documents of these lengths in which a token sees `left` tokens before itself; None for no limit.
    Raises ValueError for a window of attention that is not causal."""
    if left is not None and not causal:
        raise ValueError("the model asks for a window to both sides; only causal windows are exact here")
    if len(lengths) > 1:
        return Documents(lengths, causal=causal, left=left)
    if left is not None and left < lengths[0] - 1:
        return SlidingWindow(left)
    return Causal() if causal else Full()


def lengths_from(starts: Sequence[int], seq_len: int) -> tuple[int, ...]:
    """Lengths of documents that start at these tokens, the first at 0, of a row of `seq_len` tokens."""
    return tuple(stop - start for start, stop in pairwise((*starts, seq_len)))


def made_by(function: Callable[..., object]) -> str:
    """The name of the function that made this function."""
    return function.__qualname__.split(".")[0]


def parts_of(function: Callable[..., object], composed: Collection[str]) -> Iterator[Callable[..., object]]:
    """The functions that a mask function is made of: those in the closures of functions made by one of `composed`."""
    if made_by(function) not in composed:
        yield function
        return
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        for each in held if isinstance(held, tuple) else (held,):
            if callable(each):
                yield from parts_of(each, composed)
