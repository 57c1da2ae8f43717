"""How much each active test moves and computes: enough to measure on GPUs, little enough to test on two CPU cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes in elements and bytes; each number is the median of `blocks` timings of `repeats` calls."""

    gemm: int  # rows, columns and inner dimension
    copy_bytes: int
    peer_bytes: int
    all_reduce_bytes: int  # at least 1 GiB on GPUs: smaller ones measure latency
    pair_bytes: int
    blocks: int
    repeats: int


SIZES: dict[Device, Sizes] = {
    "cuda": Sizes(
        gemm=8192,
        copy_bytes=2 * 2**30,
        peer_bytes=2**28,
        all_reduce_bytes=2**30,
        pair_bytes=2**28,
        blocks=5,
        repeats=20,
    ),
    "cpu": Sizes(
        gemm=64, copy_bytes=2**20, peer_bytes=2**20, all_reduce_bytes=2**16, pair_bytes=2**16, blocks=3, repeats=2
    ),
}
