"""One layer's attention, forward and backward, along the schedule that the engine runs, and what collectives take.

A ring is simulated step by step on one rank: each kernel call waits for its chunk, and a chunk or gradient for its
link. Chunks, tiles and bytes come from the engine's own communication plans, so they follow mask and layout. The order
is that of `engine.attention.algorithms.ring`: transfers inside a node for the next step start with this one, those
between nodes with the outer step, and one chunk ahead may be held.

Nothing overlaps with gathered keys, or with the gathers and sums of tensor parallelism (`baselines.megatron_tp`). A
gather is a collective of NCCL, whose rings cross from node to node once, over the links of all GPUs of a node together.
A sum is an all-to-all of each rank's parts, over a rank's own links, and one sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from engine.attention.comm_plan import ChunkRanges, comm_plan, length
from engine.attention.comm_volume import all_to_all_bytes
from engine.attention.geometry.layout import Layout, Ring, as_layout
from engine.attention.masks import Mask
from engine.attention.masks.pairs import pair_table
from engine.attention.problem import ALL_GATHER, Problem, problem_of_trial
from engine.attention.resolve import HardwareModel, Resolved, asks_for_link, resolve
from engine.checkpoint.counts import layers_recomputed
from engine.method import planned_method
from engine.settings import BYTES_OF, TrialSettings
from harness.metrics.flops import ATTENTION_KERNEL_BACKWARD
from harness.metrics.hardware import HardwareSpeeds
from harness.metrics.throughput import GIB, TERA
from harness.predict.packed import packed_rows
from harness.spec.methods import all_methods, method_named


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAttention:
    """One layer's attention of a method: what its ranks resolve to, and what only a prediction knows."""

    resolved: Resolved
    tuned_links: bool = True  # NCCL set up for the site, rather than its defaults
    tensor_parallel: bool = False  # heads are divided with the columns of matrices: attention itself sends nothing

    @property
    def schedule(self) -> str:
        """That of the ranks, or tensor_parallel."""
        return "tensor_parallel" if self.tensor_parallel else self.resolved.schedule

    def across_gib(self, speeds: HardwareSpeeds) -> float:
        """GiB/s of each GPU to another node, as NCCL is set up for the method."""
        return speeds.across_gib if self.tuned_links else speeds.across_default_gib


def context_ranks_of_node(settings: TrialSettings, node_ranks: int) -> int:
    """Context-parallel ranks that share a node, of which the trial uses `node_ranks` GPUs."""
    if settings.emulate_nodes > 1:
        node_ranks = settings.world_size // settings.emulate_nodes
    size = min(settings.cp_size, max(1, node_ranks // settings.tp_size))
    while settings.cp_size % size:
        size -= 1
    return size


def attention_problem(settings: TrialSettings, node_size: int, mask: str | None = None) -> Problem:
    """Attention of one layer of a trial; of packed documents, those of a typical micro-batch of its data. `mask`: one
    of `settings.masks`, the first by default. Raises ValueError for a method that is not modelled, and for a mask or
    layout that does not exist."""
    method = planned_method(method_named(settings.method))
    if method is None:
        known = ", ".join(name for name, each in all_methods().items() if planned_method(each))
        raise ValueError(f"method {settings.method} is not predicted; choose one of {known}")
    problem = problem_of_trial(settings, as_layout(method.layout(settings)), node_size, mask)
    problem = replace(problem, kv_heads=max(1, method.kv_heads(settings) // settings.tp_size))
    rows = packed_rows(settings)
    return problem if rows is None else rows.applied(problem)


def layer_attention(settings: TrialSettings, problem: Problem, speeds: HardwareSpeeds) -> LayerAttention:
    """What the engine's ranks choose for `problem`, which is that of the trial, given the speed of the link between
    nodes where they would measure it. Raises ValueError for what cannot run."""
    method = planned_method(method_named(settings.method))
    assert method is not None, f"method {settings.method} has no `attention_problem`"
    choices = method.choices(settings)
    measured = asks_for_link(problem, choices) and not choices.deterministic
    hardware = HardwareModel(across_gib=speeds.across_gib) if measured else HardwareModel()
    return LayerAttention(
        resolved=resolve(problem, hardware, choices),
        tuned_links=settings.method == "burst" or settings.settings != "as_published",
        tensor_parallel=is_tensor_parallel(settings),
    )


def is_tensor_parallel(settings: TrialSettings) -> bool:
    """Whether the method divides matrices rather than the sequence."""
    return hasattr(method_named(settings.method), "tensor_parallel")


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


# Tokens of a causal tile with which a kernel reaches half its speed, and from which on speeds are measured. Fitted to
# windows of 1K and 4K and documents of 1K to 8K tokens, FlashAttention-4 on an H200 (results/published/h200x1: packed,
# attention_precision; h200x2: attention_window_best).
_HALF_SPEED_TOKENS, _LONG_TOKENS = 900.0, 16384.0


def kernel_seconds(forward_flops: float, pairs: float, seen: float, speeds: HardwareSpeeds, backward: bool) -> float:
    """Of one call with so many visible `pairs`: at the speed of the causal tile with as many where speeds are known by
    tile, and slower where a token of the rank sees few others in all its calls, `seen` on average."""
    tflops = speeds.attention_backward_tflops if backward else speeds.attention_forward_tflops
    if speeds.tiles is not None:
        tflops = speeds.tiles.tflops(math.sqrt(2 * pairs), backward=backward)
    tile = min(2 * seen, _LONG_TOKENS)  # tokens of a causal tile in which a token sees as many
    tflops *= tile / (tile + _HALF_SPEED_TOKENS) * (1 + _HALF_SPEED_TOKENS / _LONG_TOKENS)
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


def attention_passes(attention: LayerAttention, speeds: HardwareSpeeds) -> tuple[Pass, Pass]:
    """Forward and backward of one layer's attention."""
    found, passes = attention.resolved, _passes(attention, speeds)
    added = expansion_flops(found)
    forward, backward = (
        replace(one, kernels=one.kernels + flops / (speeds.gemm_tflops * TERA))
        for one, flops in zip(passes, added, strict=True)
    )
    return forward, backward


def expansion_flops(found: Resolved) -> tuple[float, float]:
    """FLOPs of one rank, forward and backward, that expand a latent beyond those of its own tokens once, which are
    among the products of a layer: other ranks' chunks, and in backward all that are used, once more."""
    problem, size = found.problem, found.division.ring.cp_size
    rings = problem.cp_size if found.schedule == ALL_GATHER else size
    once = problem.expansion_flops * (problem.seq_len // problem.cp_size)
    used = 1 if found.sends_queries else rings
    return once * (rings - 1), once * (3 * used - 2)


def _passes(attention: LayerAttention, speeds: HardwareSpeeds) -> tuple[Pass, Pass]:
    """The same without the expansion of a latent."""
    found, across = attention.resolved, attention.across_gib(speeds)
    problem, division = found.problem, found.division
    if problem.cp_size == 1:
        return _alone(problem, speeds, False), _alone(problem, speeds, True)
    if found.schedule == ALL_GATHER:
        return all_gather_passes(found, speeds, across)
    if division.ring.cp_size == 1:
        passes = _alone(problem, speeds, False), _alone(problem, speeds, True)
    else:
        passes = _RingOfRanks(found=found, speeds=speeds, across=across).passes()
    return _between_all_to_alls(passes, found, speeds, across)


def _alone(problem: Problem, speeds: HardwareSpeeds, backward: bool) -> Pass:
    """All visible pairs in one call, of a share of the heads."""
    pairs = problem.mask.area(problem.seq_len)
    flops = problem.pair_flops * pairs / problem.cp_size
    return Pass(kernels=kernel_seconds(flops, pairs, pairs / problem.seq_len, speeds, backward))


@dataclass(frozen=True, kw_only=True, slots=True)
class _RingOfRanks:
    """The ring of a schedule, all head chunks of a step at once, with links of `across` GiB/s between nodes."""

    found: Resolved
    speeds: HardwareSpeeds
    across: float

    @property
    def spans(self) -> bool:
        """Whether it is a flat ring over nodes: one rank of a node sends to the next, and all ranks wait for it."""
        return self.found.division.ring.nodes == 1 and self.found.problem.nodes > 1

    def passes(self) -> tuple[Pass, Pass]:
        """Forward and backward of the slowest of a few ranks."""
        size = self.found.division.ring.cp_size
        ranks = sorted({0, size // 2, size - 1})
        forward, backward = (
            max((self._simulated(rank, backward) for rank in ranks), key=lambda each: each.seconds)
            for backward in (False, True)
        )
        return forward, backward

    def _simulated(self, rank: int, backward: bool) -> Pass:
        found, problem, division = self.found, self.found.problem, self.found.division
        ring, layout = division.ring, division.layout
        sends_queries = backward and found.sends_queries
        plan = comm_plan(problem.mask, layout, ring, problem.seq_len, rank, sends_queries)
        areas = step_areas(problem.mask, layout, problem.seq_len, ring, rank, sends_queries)
        seen = sum(areas) * ring.cp_size / problem.seq_len
        part = found.shards
        chunk_bytes = found.num_head_chunks * (part.sent_side(sends_queries) if backward else part.key_side)
        gradient_bytes = found.num_head_chunks * part.gradient(sends_queries, found.summed_bytes)
        inside = self.across if self.spans else self.speeds.inside_gib
        clock = _FreeTimes(inside=inside * GIB, across=self.across * GIB)
        flops_of_pair = problem.pair_flops / division.shared_by
        local_rank = rank % ring.node_size
        kernels = steps = arrived_outer = 0.0
        for outer_step, ranges in enumerate(plan.inner_rings):
            arrived = arrived_outer
            if outer_step + 1 < ring.nodes:
                arrived_outer = clock.far(arrived, length(plan.leaving[outer_step]) * chunk_bytes)
            for inner_step in range(ring.node_size):
                area = areas[outer_step * ring.node_size + inner_step]
                following = arrived
                if inner_step + 1 < ring.node_size:
                    tokens = _received(ranges, local_rank, inner_step, ring.node_size, part.tokens)
                    following = clock.near(max(arrived, clock.previous), tokens * chunk_bytes)
                seconds = kernel_seconds(flops_of_pair * area, area, seen, self.speeds, backward) if area else 0.0
                added = self.speeds.ring_step_seconds if (outer_step or inner_step) and area else 0.0
                kernels, steps = kernels + seconds, steps + added
                clock.compute(arrived, seconds + added, from_afar=bool(outer_step) and not inner_step)
                if backward and area and inner_step:
                    owner = (local_rank - inner_step) % ring.node_size
                    clock.near_gradient(length(ranges.used[owner, local_rank]) * gradient_bytes)
                arrived = following
            if backward and outer_step:
                clock.far_gradient(length(plan.given[outer_step]) * gradient_bytes)
        waited = max(0.0, clock.finish() - kernels - steps)
        share = 1.0 if self.spans else clock.far_share
        return Pass(kernels=kernels, steps=steps, inside=waited * (1 - share), across=waited * share)


class _FreeTimes:
    """When the links and the GPU of one rank become free, in seconds from the start of a pass."""

    def __init__(self, *, inside: float, across: float) -> None:
        self._inside, self._across = inside, across
        self._near_free = self._far_free = self._gpu_free = 0.0
        self.previous = 0.0  # when the call before the last one ended: its chunk's memory is free then
        self._waited_near = self._waited_far = 0.0
        self._gradient_near = self._gradient_far = 0.0  # when the last gradients were delivered

    @property
    def far_share(self) -> float:
        """Of what was waited for, the part between nodes; 0 where nothing was."""
        return self._waited_far / ((self._waited_near + self._waited_far) or 1.0)

    def near(self, ready: float, nbytes: float) -> float:
        """A transfer inside the node that may start when `ready`; returns when it has arrived."""
        self._near_free = max(ready, self._near_free) + nbytes / self._inside
        return self._near_free

    def far(self, ready: float, nbytes: float) -> float:
        """The same between nodes."""
        self._far_free = max(ready, self._far_free) + nbytes / self._across
        return self._far_free

    def compute(self, arrived: float, seconds: float, from_afar: bool) -> None:
        """A kernel call on a chunk that has `arrived` then."""
        waiting = max(0.0, arrived - self._gpu_free)
        if from_afar:
            self._waited_far += waiting
        else:
            self._waited_near += waiting
        self.previous = self._gpu_free
        self._gpu_free = max(arrived, self._gpu_free) + seconds

    def near_gradient(self, nbytes: float) -> None:
        self._gradient_near = self.near(self._gpu_free, nbytes)

    def far_gradient(self, nbytes: float) -> None:
        self._gradient_far = self.far(max(self._gpu_free, self._gradient_near), nbytes)

    def finish(self) -> float:
        """When the last call has ended and all gradients have been returned."""
        end = max(self._gpu_free, self._gradient_near, self._gradient_far)
        late_far = max(0.0, self._gradient_far - max(self._gpu_free, self._gradient_near))
        self._waited_far += late_far
        self._waited_near += max(0.0, end - self._gpu_free - late_far)
        return end


def _received(ranges: ChunkRanges, local_rank: int, inner_step: int, size: int, tokens: int) -> int:
    """Tokens of the chunk that a rank works on at the next inner step."""
    owner = (local_rank - inner_step - 1) % size
    whole = tokens if ranges.held is None else length(ranges.held[owner])
    return min(whole, length(ranges.used[owner, local_rank])) if (owner, local_rank) in ranges.used else whole


def _between_all_to_alls(
    inner: tuple[Pass, Pass], found: Resolved, speeds: HardwareSpeeds, across: float
) -> tuple[Pass, Pass]:
    """Forward and backward with the heads exchanged around them; one member of an all-to-all exchanges nothing."""
    members, chunks = found.division.members(0), found.num_head_chunks
    if len(members) == 1:
        return inner
    sent = all_to_all_bytes(
        members, members[0], found.problem.node_size, found.shards, gathered=True, packed=False
    ).times(chunks)  # fmt: skip
    passes = []
    for call, around in zip((sent.forward, sent.backward), inner, strict=True):
        near, far = call.near / (speeds.inside_gib * GIB), call.far / (across * GIB)
        exposed = 1 / chunks  # the rest overlaps with the kernels of another chunk
        passes.append(around + Pass(kernels=0.0, inside=near * exposed, across=far * exposed))
    return passes[0], passes[1]


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


def all_gather_passes(found: Resolved, speeds: HardwareSpeeds, across: float) -> tuple[Pass, Pass]:
    """Forward and backward of the rank with most to compute: K and V gathered and put in order, a call for each tile;
    in backward gathered again, and the gradients of all keys written by owner and reduced."""
    problem, part = found.problem, found.shards
    group = RankGroup(ranks=problem.cp_size, node_ranks=problem.node_size, inside=speeds.inside_gib, across=across)
    keys = part.key_side * part.tokens
    gradients = part.gradient(False, found.summed_bytes) * part.tokens
    inside, between = group.gather(keys)
    back_inside, back_between = group.reduce(gradients)
    copied = 2 * problem.cp_size / (speeds.memory_gib * GIB)  # seconds per byte of a shard: all read and written
    ring = Ring(cp_size=problem.cp_size, node_size=problem.cp_size)
    calls = []
    for rank in sorted({0, problem.cp_size // 2, problem.cp_size - 1}):
        areas = step_areas(problem.mask, problem.layout, problem.seq_len, ring, rank, False)
        calls.append((areas, sum(areas) / part.tokens))

    def kernels(backward: bool) -> float:
        return max(
            sum(kernel_seconds(problem.pair_flops * area, area, seen, speeds, backward) for area in areas if area)
            for areas, seen in calls
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
