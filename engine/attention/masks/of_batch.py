"""Documents whose lengths each batch brings with it: what `mask: documents` says before there is a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine.attention.geometry.tile_table import Region
from engine.attention.geometry.tiles import NO_LIMIT
from engine.attention.masks.mask import Mask


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
