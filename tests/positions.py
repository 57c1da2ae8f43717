"""Global positions of a shard's tokens, in local order."""

from __future__ import annotations

from engine.attention.geometry.layout import Layout


def shard_positions(layout: Layout, seq_len: int, cp_size: int, cp_rank: int) -> list[int]:
    """Position of each local token of `cp_rank`."""
    segments = layout.segments(seq_len, cp_size, cp_rank)
    return [position for segment in segments for position in segment.positions()]
