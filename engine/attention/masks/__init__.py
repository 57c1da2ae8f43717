"""Masks: which keys each query sees, in global positions, the same under every layout and CP size. Public.

A mask is a frozen dataclass that lists its regions (`mask.Mask`), one file per kind; `pairs` has what it leaves between
ranks. Pure integers: no torch tensors, no kernels, no communication.
"""

from __future__ import annotations

import re

from engine.attention.geometry.rectangles import Region
from engine.attention.geometry.tile_table import TooManyTiles
from engine.attention.masks.block_sparse import (
    BlockGrid,
    BlockPattern,
    BlockSparse,
    LocalGlobal,
    Strided,
    parse_pattern,
)
from engine.attention.masks.documents import Documents, DocumentsOfBatch
from engine.attention.masks.mask import Causal, Full, Mask, SlidingWindow
from engine.attention.masks.pairs import imbalance, kept_share, rank_areas, recompute_share

__all__ = [
    "BlockGrid",
    "BlockPattern",
    "BlockSparse",
    "Causal",
    "Documents",
    "DocumentsOfBatch",
    "Full",
    "LocalGlobal",
    "Mask",
    "Region",
    "SlidingWindow",
    "Strided",
    "TooManyTiles",
    "imbalance",
    "kept_share",
    "parse_mask",
    "rank_areas",
    "recompute_share",
]

_TOKENS = r"[0-9]+[kM]?"
_SPAN = f"{_TOKENS}-{_TOKENS}"
_DOCUMENTS = (
    rf"(?P<lengths>{_TOKENS}(,{_TOKENS})*)(?P<repeat>,\.\.\.)?(?P<full>:full)?"
    rf"(:left-(?P<left>{_TOKENS}))?(:spans-(?P<spans>{_SPAN}(,{_SPAN})*))?"
)
_UNITS = {"k": 1 << 10, "M": 1 << 20}


def _tokens(text: str) -> int:
    """4096 or 4k."""
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text)


def parse_mask(setting: str) -> Mask:
    """Read a mask as experiment files write it. Token counts are plain, or in k (1024) or M (1048576).

    - `full`, `causal`
    - `sliding_window:LEFT`, `sliding_window:LEFT:RIGHT`, `sliding_window:LEFT:RIGHT:GLOBAL`, whose first GLOBAL tokens
      every query sees
    - `documents`: those of each batch of packed text, in training; `documents:left-LEFT` in layers with a window
    - `documents:LENGTH,LENGTH,...`: lengths that sum to the sequence, or, ending in a literal `...`, repeat until it is
      full; `:full` behind them lets a document's tokens see later ones, `:left-LEFT` no more than LEFT tokens before
      them, and `:spans-START-STOP,START-STOP,...` those in a span of positions its later ones
    - `block_sparse:BLOCK_SIZE:PATTERN`, `:causal` behind it to hide later keys; the pattern is `strided-STRIDE`,
      `local_global-REACH-GLOBAL` (in blocks) or a grid such as `10/11`, one row per block of queries

    Raises ValueError for anything else.
    """
    name, *arguments = setting.split(":")
    joined = ":".join(arguments)
    if setting in ("full", "causal"):
        return Full() if setting == "full" else Causal()
    if name == "documents" and (found := re.fullmatch(rf"(left-({_TOKENS}))?", joined)) and setting != "documents:":
        return DocumentsOfBatch(None if found[2] is None else _tokens(found[2]))
    if name == "sliding_window" and re.fullmatch(rf"{_TOKENS}(:{_TOKENS}){{0,2}}", joined):
        return SlidingWindow(*map(_tokens, arguments))
    if name == "documents" and (found := re.fullmatch(_DOCUMENTS, joined)):
        spans = found["spans"].split(",") if found["spans"] else []
        return Documents(
            tuple(map(_tokens, found["lengths"].split(","))),
            causal=found["full"] is None,
            repeat=found["repeat"] is not None,
            left=None if found["left"] is None else _tokens(found["left"]),
            spans=tuple((_tokens(start), _tokens(stop)) for start, stop in (span.split("-") for span in spans)),
        )
    if name == "block_sparse" and re.fullmatch(rf"{_TOKENS}:[^:]+(:causal)?", joined):
        return BlockSparse(parse_pattern(arguments[1]), _tokens(arguments[0]), causal=len(arguments) == 3)
    raise ValueError(
        f"mask {setting!r} is unknown; write full, causal or sliding_window:LEFT[:RIGHT[:GLOBAL]], "
        "documents[:LENGTH,...[:full][:left-LEFT][:spans-START-STOP,...]] or "
        "block_sparse:BLOCK_SIZE:PATTERN[:causal] (tokens)"
    )
