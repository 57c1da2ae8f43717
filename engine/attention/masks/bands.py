"""Masks that are one band of keys around each query: full, causal, and windows, with tokens that all queries see."""

from __future__ import annotations

from dataclasses import dataclass

from engine.attention.geometry.tile_table import Region
from engine.attention.masks.mask import Mask


@dataclass(frozen=True, slots=True)
class Full(Mask):
    """Every query sees every key."""

    def regions(self, tokens: int) -> list[Region]:
        return [Region(0, tokens, 0, tokens)]

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """A query sees itself and all earlier keys."""

    def regions(self, tokens: int) -> list[Region]:
        return [Region(0, tokens, 0, tokens, right=0)]

    def __str__(self) -> str:
        return "causal"


@dataclass(frozen=True, slots=True)
class SlidingWindow(Mask):
    """A query sees itself, `left` tokens before it and `right` after it.

    The sequence's first `global_tokens` tokens are global: every query sees them, and they see every key, but where
    `right` is 0 no query sees a later one. Sources: Longformer (arXiv:2004.05150); as attention sinks
    StreamingLLM (arXiv:2309.17453).
    """

    left: int
    right: int = 0
    global_tokens: int = 0

    def __post_init__(self) -> None:
        if self.left < 0 or self.right < 0:
            raise ValueError(f"sliding window ({self.left}, {self.right}) has a negative side; give token counts >= 0")
        if self.global_tokens < 0:
            raise ValueError(f"sliding window has {self.global_tokens} global tokens; give a token count >= 0")

    def regions(self, tokens: int) -> list[Region]:
        if not self.global_tokens:
            return [Region(0, tokens, 0, tokens, self.left, self.right)]
        known = min(self.global_tokens, tokens)
        apart = min(known + self.left + 1, tokens)  # from here on a key lies between the window and the global tokens
        if self.right == 0:
            first = [Region(0, apart, 0, apart, right=0)]
        else:
            first = [Region(0, known, 0, tokens), Region(known, apart, 0, tokens, right=self.right)]
        return [*first, Region(apart, tokens, 0, tokens, self.left, self.right), Region(apart, tokens, 0, known)]

    def __str__(self) -> str:
        sides = f"sliding_window:{self.left}"
        if self.global_tokens:
            return f"{sides}:{self.right}:{self.global_tokens}"
        return f"{sides}:{self.right}" if self.right else sides
