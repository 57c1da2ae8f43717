"""One layer's attention as the prediction sees it: how a method moves tensors, and what a pass takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from engine.attention.comm_volume import GradientWidths, Shards
from engine.attention.geometry.layout import Layout
from engine.attention.geometry.ring import Ring
from engine.attention.masks import Mask
from engine.attention.masks.pairs import pair_table
from engine.attention.problem import Problem
from harness.metrics.flops import ATTENTION_KERNEL_BACKWARD
from harness.metrics.hardware import HardwareSpeeds
from harness.predict.speeds import TERA

Side = Literal["query", "key_value"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """How a method moves chunks and heads."""

    schedule: str  # ring, double_ring, all_gather, ulysses, usp, usp_transposed; tensor_parallel moves none
    backward: Side
    gradient_bytes: int  # per element of a partial gradient between ranks
    tuned_links: bool = True  # NCCL set up for the site, rather than its defaults
    head_chunks: int = 1  # of an all-to-all: all but one overlap with compute
    reason: str = ""  # why the schedule runs: that it is given, or how `auto` chose it

    def across_gib(self, speeds: HardwareSpeeds) -> float:
        """GiB/s of each GPU to another node, as NCCL is set up for the method."""
        return speeds.across_gib if self.tuned_links else speeds.across_default_gib

    def shards(self, problem: Problem, shared_by: int = 1) -> Shards:
        """Of a rank that divides the heads among `shared_by` ranks and holds their tokens."""
        width = GradientWidths(unreduced=self.gradient_bytes, summed=self.gradient_bytes)
        return Shards.of(problem, (width,) * 3, shared_by=shared_by)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Seconds of one pass on the slowest of the simulated ranks, and what it waited for."""

    kernels: float
    inside: float = 0.0  # waiting for transfers inside the node
    across: float = 0.0  # waiting for transfers between nodes
    steps: float = 0.0  # what the steps of a ring add

    @property
    def seconds(self) -> float:
        return self.kernels + self.inside + self.across + self.steps

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            kernels=self.kernels + other.kernels,
            inside=self.inside + other.inside,
            across=self.across + other.across,
            steps=self.steps + other.steps,
        )


def kernel_seconds(forward_flops: float, pairs: float, speeds: HardwareSpeeds, backward: bool) -> float:
    """Of one call: at the speed of the causal tile with as many visible pairs where speeds are known by tile."""
    tflops = speeds.attention_backward_tflops if backward else speeds.attention_forward_tflops
    if speeds.tiles is not None:
        tflops = speeds.tiles.tflops(math.sqrt(2 * pairs), backward=backward)
    return (ATTENTION_KERNEL_BACKWARD if backward else 1.0) * forward_flops / (tflops * TERA)


@lru_cache(maxsize=512)
def step_areas(mask: Mask, layout: Layout, seq_len: int, ring: Ring, rank: int, sends_queries: bool) -> tuple[int, ...]:
    """Visible pairs of each of a rank's steps."""
    pairs = pair_table(mask, layout, seq_len, ring.cp_size)
    areas = []
    for step in range(ring.cp_size):
        owner = ring.owner(rank, step)
        q_rank, k_rank = (owner, rank) if sends_queries else (rank, owner)
        areas.append(pairs.area(q_rank, k_rank))
    return tuple(areas)
