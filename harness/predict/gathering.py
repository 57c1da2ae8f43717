"""What collectives take: attention over gathered keys, and the gathers and sums of tensor parallelism.

Nothing overlaps with them. The steps are those of `engine.attention.algorithms.all_gather` and
`baselines.megatron_tp`. A gather is a collective of NCCL, whose rings cross from node to node once, over the links of
all GPUs of a node together. A sum is an all-to-all of each rank's parts, over a rank's own links, and one sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.attention.geometry.ring import Ring
from engine.attention.problem import Problem
from engine.checkpoint.counts import layers_recomputed
from engine.settings import BYTES_OF, TrialSettings
from harness.metrics.hardware import HardwareSpeeds
from harness.metrics.throughput import GIB
from harness.predict.problem import Exchange, Pass, kernel_seconds, step_areas


@dataclass(frozen=True, kw_only=True, slots=True)
class RankGroup:
    """Ranks that gather and sum, evenly over nodes, and their links in GiB/s."""

    ranks: int
    node_ranks: int  # of the group's on one node
    inside: float
    across: float

    def gather(self, nbytes: float) -> tuple[float, float]:
        """Seconds (inside a node, between nodes) until all ranks hold what each brings `nbytes` of: the slower link's,
        as parts are passed on while others arrive."""
        near = (self.ranks - 1) * nbytes / (self.inside * GIB)
        far = (self.ranks / self.node_ranks - 1) * nbytes / (self.across * GIB)
        return (near, 0.0) if near >= far else (0.0, far)

    def reduce(self, nbytes: float) -> tuple[float, float]:
        """The same until each rank has received its part, of `nbytes`, from every other."""
        near = (self.node_ranks - 1) * nbytes / (self.inside * GIB)
        return near, (self.ranks - self.node_ranks) * nbytes / (self.across * GIB)


def all_gather_passes(problem: Problem, exchange: Exchange, speeds: HardwareSpeeds, across: float) -> tuple[Pass, Pass]:
    """Forward and backward of the rank with most to compute: K and V gathered and put in order, a call for each tile;
    in backward gathered again, and the gradients of all keys written by owner and reduced."""
    group = RankGroup(ranks=problem.cp_size, node_ranks=problem.node_size, inside=speeds.inside_gib, across=across)
    part = exchange.shards(problem)
    keys = 2 * part.key * part.tokens
    gradients = part.gradient(False, exchange.gradient_bytes) * part.tokens
    inside, between = group.gather(keys)
    back_inside, back_between = group.reduce(gradients)
    copied = 2 * problem.cp_size / (speeds.memory_gib * GIB)  # seconds per byte of a shard: all read and written
    ring = Ring(cp_size=problem.cp_size, node_size=problem.cp_size)
    calls = [
        step_areas(problem.mask, problem.layout, problem.seq_len, ring, rank, False)
        for rank in sorted({0, problem.cp_size // 2, problem.cp_size - 1})
    ]

    def kernels(backward: bool) -> float:
        return max(
            sum(kernel_seconds(problem.pair_flops * area, area, speeds, backward) for area in areas if area)
            for areas in calls
        )

    return (
        Pass(kernels=kernels(False), inside=inside, across=between, steps=copied * keys),
        Pass(
            kernels=kernels(True), inside=inside + back_inside, across=between + back_between,
            steps=copied * (keys + gradients),
        ),
    )  # fmt: skip


def tensor_parallel_transfers(settings: TrialSettings) -> tuple[int, int]:
    """(gathers, sums) of hidden states in a micro-batch.

    Each layer gathers its tokens before attention and before the MLP and sums behind both; backward does the reverse
    of each. A layer that is computed again repeats all but the last sum, whose result no gradient needs. Embedding and
    head have one of a kind each, in forward and reversed in backward.
    """
    layers = settings.model.layers
    again = settings.checkpoint.layers_again(layers)
    runs = again + (layers_recomputed(settings.checkpoint, again) if again else 0)
    once = 2 * layers + 1  # of either kind, in forward as in backward
    return 2 * once + 2 * runs, 2 * once + 2 * runs - again


def tensor_parallel_seconds(settings: TrialSettings, speeds: HardwareSpeeds, node_ranks: int, across: float) -> Pass:
    """What a step's gathers and sums of tensor parallelism take, by the links that they wait for; no kernels."""
    ranks = settings.tp_size
    if ranks == 1:
        return Pass(kernels=0.0)
    group = RankGroup(ranks=ranks, node_ranks=min(ranks, node_ranks), inside=speeds.inside_gib, across=across)
    model, item = settings.model, BYTES_OF[settings.dtype]
    nbytes = item * settings.seq_len * settings.batch_size / ranks * model.hidden  # of a rank's tokens
    gathers, sums = tensor_parallel_transfers(settings)
    micro = settings.gradient_accumulation
    near, far = (
        micro * (gathers * gather + sums * reduce)
        for gather, reduce in zip(group.gather(nbytes), group.reduce(nbytes), strict=True)
    )
    summed = micro * sums * 2 * ranks * nbytes / (speeds.memory_gib * GIB)  # parts copied to the message, and added up
    return Pass(kernels=0.0, inside=near, across=far, steps=summed)
