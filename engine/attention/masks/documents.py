"""Packed documents: several texts share one sequence and none sees another. Also before a batch has brought them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from operator import index
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from engine.attention.geometry.balanced import Balanced
from engine.attention.geometry.document_parts import bounds_in
from engine.attention.geometry.layout import ZigzagOfDocuments
from engine.attention.geometry.rectangles import Region
from engine.attention.geometry.tiles import NO_LIMIT, Integers
from engine.attention.masks.mask import Mask, whole_number

if TYPE_CHECKING:
    from torch import Tensor

DealtLayout = TypeVar("DealtLayout", bound=Balanced | ZigzagOfDocuments)


@dataclass(frozen=True, slots=True)
class Documents(Mask):
    """Consecutive documents of the given lengths; a query sees its own document, with `causal` only earlier keys.

    Args:
        lengths: tokens of each document. They sum to the sequence.
        causal: hide keys that come after the query.
        repeat: the lengths start again until the sequence is full, and the last document is cut short.
        left: a query sees at most so many tokens before itself, as `left` of `SlidingWindow`; None for no limit.
        spans: (start, stop) of runs of positions, each inside a document, whose tokens also see the later tokens of
            their run: an image inside a causal text, or a prefix. They ascend and share no token.
    """

    lengths: Sequence[int]  # kept as a tuple
    causal: bool = True
    repeat: bool = False
    left: int | None = None
    spans: Sequence[tuple[int, int]] = ()  # kept as a tuple
    # Positions at which the documents start, and the hash: formed once, because calls ask for both.
    _starts: Integers = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            lengths = tuple(map(index, self.lengths))
        except TypeError as error:
            raise ValueError(
                f"document lengths {str(self.lengths)[:80]} are not all whole numbers; give tokens per document"
            ) from error
        if not lengths or min(lengths) < 1:
            raise ValueError(f"document lengths {list(lengths)[:8]} are not all positive; give tokens per document")
        if self.left is not None:
            object.__setattr__(self, "left", whole_number(self.left, "documents have left"))
        for name in ("causal", "repeat"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"documents have {name} {getattr(self, name)!r}; give True or False")
        try:
            spans = tuple((index(start), index(stop)) for start, stop in self.spans)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"document spans {str(self.spans)[:80]} are not all two positions; give (start, stop) of each"
            ) from error
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "spans", spans)
        object.__setattr__(self, "_starts", np.cumsum((0, *lengths)))
        object.__setattr__(self, "_hash", hash((lengths, self.causal, self.repeat, self.left, spans)))
        if spans:
            self._check_spans(np.array(spans))

    def _check_spans(self, spans: Integers) -> None:
        start, stop = spans.T
        if not self.causal or self.repeat:
            raise ValueError("documents have spans, which are for causal documents that do not repeat; leave them out")
        document = np.searchsorted(self._starts, start, side="right")
        inside = (
            (start >= 0)
            & (start < stop)
            & (stop <= np.append(self._starts, 0)[np.minimum(document, len(self._starts))])
        )
        if not inside.all() or (start[1:] < stop[:-1]).any():
            wrong = spans[np.argmin(inside)] if not inside.all() else spans[1:][np.argmax(start[1:] < stop[:-1])]
            raise ValueError(
                f"span {tuple(wrong.tolist())} is empty, not inside one document, or begins in the one before it; give "
                "ascending (start, stop) of positions"
            )

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor | Sequence[int], causal: bool = True, left: int | None = None
    ) -> Documents:
        """From the positions at which documents start, and the last one ends: 0, ..., seq_len, as
        `flash_attn_varlen_func` takes them; equal ones are an empty document, which is left out. The host waits for a
        tensor on a GPU. Raises ValueError when they do not start with 0, or descend."""
        if getattr(cu_seqlens, "is_meta", False) or getattr(cu_seqlens, "is_sparse", False):
            raise ValueError("cu_seqlens is a tensor without values of its own; give a dense one, or a list of numbers")
        try:
            bounds = np.asarray(cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens)
        except ValueError:  # of lists of unequal lengths
            bounds = np.empty(0, object)
        if bounds.ndim != 1 or len(bounds) < 2 or bounds.dtype.kind not in "iu":
            found = "without a document" if bounds.ndim == 1 else f"of shape {bounds.shape}"
            found = found if bounds.ndim != 1 or len(bounds) < 2 else f"of {bounds.dtype}"
            raise ValueError(
                f"cu_seqlens is {found}; give whole numbers from 0 to the sequence's length in one dimension"
            )
        if bounds[0] != 0:
            raise ValueError(
                f"cu_seqlens starts with {bounds[0]}; it has to start with 0 and to end with the sequence's length"
            )
        lengths = np.diff(bounds)
        if lengths.min() < 0:
            at = int(lengths.argmin())
            raise ValueError(f"cu_seqlens has {bounds[at + 1]} after {bounds[at]}; give positions that do not descend")
        if bounds[-1] == 0:
            raise ValueError("cu_seqlens ends with 0; it has to end with the sequence's length")
        lengths = lengths[lengths > 0]
        return cls(tuple(lengths.tolist()), causal, left=left)

    def __hash__(self) -> int:
        return self._hash

    @property
    def tokens(self) -> int:
        """Tokens of all documents together."""
        return int(self._starts[-1])

    def dealt(self, layout: DealtLayout) -> DealtLayout:
        """A layout that knows documents, with these."""
        seen = ("lengths", "causal", "repeat", "left", "spans")
        return replace(layout, **{each.name: getattr(self, each.name) for each in fields(layout) if each.name in seen})

    def unsupported_reason(self, seq_len: int) -> str | None:
        if self.repeat or self.tokens == seq_len:
            return None
        return (
            f"{len(self.lengths)} documents hold {self.tokens} tokens and the sequence has {seq_len}; give lengths "
            "that sum to it, or repeat them"
        )

    def lengths_in(self, tokens: int) -> list[int]:
        """Tokens of each document of a sequence, with repetitions."""
        lengths: list[int] = np.diff(bounds_in(self._starts, tokens, self.repeat)).tolist()
        return lengths

    def regions(self, tokens: int) -> Integers:
        bounds = bounds_in(self._starts, tokens, self.repeat)
        left, right = NO_LIMIT if self.left is None else self.left, 0 if self.causal else NO_LIMIT
        regions = np.empty((len(bounds) - 1, 6), dtype=np.int64)
        regions[:, 0::2], regions[:, 1::2] = bounds[:-1, None], bounds[1:, None]
        regions[:, 4:] = left, right
        if not self.spans:
            return regions
        start, stop = np.array(self.spans).T  # queries see the later keys of their span, at a distance of 1 and more
        later = np.full_like(start, -1), np.full_like(start, NO_LIMIT)
        return np.concatenate((regions, np.stack((start, stop, start, stop, *later), axis=-1)))

    def __str__(self) -> str:
        parts = [f"documents:{','.join(map(str, self.lengths))}" + (",..." if self.repeat else "")]
        parts += [] if self.causal else ["full"]
        parts += [] if self.left is None else [f"left-{self.left}"]
        parts += ["spans-" + ",".join(f"{start}-{stop}" for start, stop in self.spans)] if self.spans else []
        return ":".join(parts)


@dataclass(frozen=True, slots=True)
class DocumentsOfBatch(Mask):
    """A placeholder. Training replaces it in every step by `Documents` with the lengths of that step's batch, causal
    inside each document; `left` is that of `Documents`, of layers with a window.

    Layouts and memory are planned as if one document filled the sequence, the most work that a batch can bring.
    Attention itself refuses it.
    """

    left: int | None = None

    without_lengths: ClassVar[str] = (
        "mask DocumentsOfBatch has no lengths, which only a batch of packed documents brings; pass "
        "Documents(lengths) or Documents.from_cu_seqlens(cu_seqlens)"
    )

    def regions(self, tokens: int) -> list[Region]:
        return [Region(0, tokens, 0, tokens, NO_LIMIT if self.left is None else self.left, 0)]

    def __str__(self) -> str:
        return "documents" if self.left is None else f"documents:left-{self.left}"
