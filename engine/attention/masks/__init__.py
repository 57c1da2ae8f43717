"""Masks: which keys each query sees, in global positions, the same under every layout and CP size. Public.

A mask is a frozen object of `mask.Mask`, one file per kind; `setting` reads them from experiment files, `balance` says
how evenly a layout divides their work. Pure integers: no torch tensors, no kernels, no communication.
"""

from __future__ import annotations

from engine.attention.masks.balance import (
    band_kinds,
    imbalance,
    kept_share,
    rank_areas,
    rank_pair_tiles,
    recompute_share,
)
from engine.attention.masks.bands import Causal, Full
from engine.attention.masks.block_sparse import BlockSparse
from engine.attention.masks.blocks import TooManyTiles
from engine.attention.masks.documents import Documents
from engine.attention.masks.mask import Mask
from engine.attention.masks.patterns import Grid, LocalGlobal, Pattern, Strided
from engine.attention.masks.setting import parse_mask
from engine.attention.masks.window import SlidingWindow

__all__ = [
    "BlockSparse",
    "Causal",
    "Documents",
    "Full",
    "Grid",
    "LocalGlobal",
    "Mask",
    "Pattern",
    "SlidingWindow",
    "Strided",
    "TooManyTiles",
    "band_kinds",
    "imbalance",
    "kept_share",
    "parse_mask",
    "rank_areas",
    "rank_pair_tiles",
    "recompute_share",
]
