"""One layer's attention, forward and backward, along the schedule that the engine runs.

A ring is simulated step by step on one rank: each kernel call waits for its chunk, and a chunk or gradient for its
link. Chunks, tiles and bytes come from the engine's own communication plans, so they follow mask and layout. The order
is that of `engine.attention.algorithms.ring`: transfers inside a node for the next step start with this one, those
between nodes with the outer step, and one chunk ahead may be held.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from engine.attention.geometry.layout import Gathered, Layout
from engine.attention.geometry.ring import Ring
from engine.attention.masks import Mask
from engine.attention.planning.comm_plan import ChunkRanges, comm_plan, length
from engine.attention.planning.comm_volume import Shards, Widths, all_to_all_bytes
from engine.attention.planning.pair_table import pair_table
from harness.metrics.flops import ATTENTION_KERNEL_BACKWARD
from harness.predict.speeds import GIB, TERA, Speeds

Side = Literal["query", "key_value"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionProblem:
    """Attention over one sequence on ranks that are spread over nodes."""

    mask: Mask
    layout: Layout
    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    input_bytes: int  # per element of Q, K and V
    cp_size: int
    node_size: int  # context-parallel ranks of a node

    @property
    def nodes(self) -> int:
        return self.cp_size // self.node_size

    @property
    def pair_flops(self) -> float:
        """Of one visible (query, key) pair in forward, over batch and heads."""
        return 4.0 * self.batch * self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """How a method moves chunks and heads."""

    schedule: str  # ring, double_ring, ulysses, usp, usp_transposed, all_gather
    backward: Side
    gradient_bytes: int  # per element of a partial gradient between ranks
    tuned_links: bool = True  # NCCL set up for the site, rather than its defaults
    head_chunks: int = 1  # of an all-to-all: all but one overlap with compute


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


def attention_passes(problem: AttentionProblem, exchange: Exchange, speeds: Speeds) -> tuple[Pass, Pass]:
    """Forward and backward of one layer's attention. Raises ValueError for what the schedule cannot run."""
    across = speeds.across_gib if exchange.tuned_links else speeds.across_default_gib
    if problem.cp_size == 1:
        return _alone(problem, speeds, False), _alone(problem, speeds, True)
    if exchange.schedule in ("ring", "double_ring"):
        size = problem.cp_size if exchange.schedule == "ring" else problem.node_size
        ring = Ring(cp_size=problem.cp_size, node_size=size)
        return _ring_passes(problem, exchange, speeds, across, ring, problem.layout, 1)
    return _all_to_all_passes(problem, exchange, speeds, across)


def _alone(problem: AttentionProblem, speeds: Speeds, backward: bool) -> Pass:
    flops = problem.pair_flops * problem.mask.area(problem.seq_len) / problem.cp_size
    return Pass(kernels=_kernel_seconds(flops, speeds, backward))


def _kernel_seconds(forward_flops: float, speeds: Speeds, backward: bool) -> float:
    if backward:
        return ATTENTION_KERNEL_BACKWARD * forward_flops / (speeds.attention_backward_tflops * TERA)
    return forward_flops / (speeds.attention_forward_tflops * TERA)


def _ring_passes(
    problem: AttentionProblem,
    exchange: Exchange,
    speeds: Speeds,
    across: float,
    ring: Ring,
    layout: Layout,
    shared_by: int,
) -> tuple[Pass, Pass]:
    """Along a ring whose ranks each hold `1 / shared_by` of the heads."""
    ranks = sorted({0, ring.cp_size // 2, ring.cp_size - 1})
    # On a flat ring over nodes one rank of a node sends to the next node, and all ranks wait for it.
    inside = across if ring.nodes == 1 and problem.nodes > 1 else speeds.inside_gib
    spans = ring.nodes == 1 and problem.nodes > 1
    passes = []
    for backward in (False, True):
        sends_queries = backward and exchange.backward == "query"
        found = [
            _simulate(problem, exchange, speeds, ring, layout, shared_by, rank, backward, sends_queries, inside, across)
            for rank in ranks
        ]
        slowest = max(found, key=lambda each: each.seconds)
        if spans:  # that link is between nodes
            slowest = Pass(kernels=slowest.kernels, across=slowest.inside + slowest.across, steps=slowest.steps)
        passes.append(slowest)
    return passes[0], passes[1]


@lru_cache(maxsize=512)
def _areas(mask: Mask, layout: Layout, seq_len: int, ring: Ring, rank: int, sends_queries: bool) -> tuple[int, ...]:
    """Visible pairs of each of a rank's steps."""
    pairs = pair_table(mask, layout, seq_len, ring.cp_size)
    areas = []
    for step in range(ring.cp_size):
        owner = ring.owner(rank, step)
        q_rank, k_rank = (owner, rank) if sends_queries else (rank, owner)
        areas.append(sum(tile.area() for tile in pairs.tiles(q_rank, k_rank)))
    return tuple(areas)


def _simulate(
    problem: AttentionProblem,
    exchange: Exchange,
    speeds: Speeds,
    ring: Ring,
    layout: Layout,
    shared_by: int,
    rank: int,
    backward: bool,
    sends_queries: bool,
    inside: float,
    across: float,
) -> Pass:
    plan = comm_plan(problem.mask, layout, ring, problem.seq_len, rank, sends_queries)
    areas = _areas(problem.mask, layout, problem.seq_len, ring, rank, sends_queries)
    part = _shards(problem, exchange, ring, shared_by)
    chunk_bytes = part.sent_side(sends_queries) if backward else 2 * part.key
    gradient_bytes = part.gradient(sends_queries, exchange.gradient_bytes) if backward else 0
    clock = _Clock(inside=inside * GIB, across=across * GIB)
    flops_of_pair = problem.pair_flops / shared_by
    local_rank = rank % ring.node_size
    kernels = steps = 0.0
    arrived_outer = 0.0
    for outer_step, ranges in enumerate(plan.inner_rings):
        arrived = arrived_outer
        if outer_step + 1 < ring.nodes:
            arrived_outer = clock.far(arrived, length(plan.leaving[outer_step]) * chunk_bytes)
        for inner_step in range(ring.node_size):
            step = outer_step * ring.node_size + inner_step
            following = arrived
            if inner_step + 1 < ring.node_size:
                tokens = _received(ranges, local_rank, inner_step, ring.node_size, part.tokens)
                following = clock.near(max(arrived, clock.previous), tokens * chunk_bytes)
            seconds = _kernel_seconds(flops_of_pair * areas[step], speeds, backward)
            added = speeds.ring_step_seconds if step and areas[step] else 0.0
            kernels, steps = kernels + seconds, steps + added
            clock.compute(arrived, seconds + added, from_afar=bool(outer_step) and not inner_step)
            if backward and areas[step] and inner_step:
                owner_tokens = _touched(ranges, local_rank, inner_step, ring.node_size)
                clock.near_gradient(owner_tokens * gradient_bytes)
            arrived = following
        if backward and outer_step:
            clock.far_gradient(length(plan.given[outer_step]) * gradient_bytes)
    total = clock.finish()
    waited = max(0.0, total - kernels - steps)
    share = clock.waited_far / (clock.waited_far + clock.waited_near) if waited and clock.waited else 0.0
    return Pass(kernels=kernels, steps=steps, inside=waited * (1 - share), across=waited * share)


class _Clock:
    """When the links and the GPU of one rank become free, in seconds from the start of a pass."""

    def __init__(self, *, inside: float, across: float) -> None:
        self._inside, self._across = inside, across
        self._near_free = self._far_free = self._gpu_free = 0.0
        self.previous = 0.0  # when the call before the last one ended: its chunk's memory is free then
        self.waited_near = self.waited_far = 0.0
        self._gradient_near = self._gradient_far = 0.0  # when the last gradients were delivered

    @property
    def waited(self) -> float:
        return self.waited_near + self.waited_far

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
            self.waited_far += waiting
        else:
            self.waited_near += waiting
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
        self.waited_far += late_far
        self.waited_near += max(0.0, end - self._gpu_free - late_far)
        return end


def _received(ranges: ChunkRanges, local_rank: int, inner_step: int, size: int, tokens: int) -> int:
    """Tokens of the chunk that a rank works on at the next inner step."""
    owner = (local_rank - inner_step - 1) % size
    whole = tokens if ranges.held is None else length(ranges.held[owner])
    return min(whole, length(ranges.used[owner, local_rank])) if (owner, local_rank) in ranges.used else whole


def _touched(ranges: ChunkRanges, local_rank: int, inner_step: int, size: int) -> int:
    return length(ranges.used[(local_rank - inner_step) % size, local_rank])


def _shards(problem: AttentionProblem, exchange: Exchange, ring: Ring, shared_by: int) -> Shards:
    widths = Widths(unreduced=exchange.gradient_bytes, summed=exchange.gradient_bytes)
    return Shards(
        batch=problem.batch,
        tokens=problem.seq_len // ring.cp_size,
        heads=max(1, problem.heads // shared_by),
        kv_heads=max(1, problem.kv_heads // shared_by),
        head_dim=problem.head_dim,
        input_bytes=problem.input_bytes,
        intra_node=widths,
        inter_node=widths,
    )


def _all_to_all_passes(
    problem: AttentionProblem, exchange: Exchange, speeds: Speeds, across: float
) -> tuple[Pass, Pass]:
    """Heads exchanged among some ranks, around attention of the rest: alone, or a ring."""
    size, schedule = problem.node_size, exchange.schedule
    members = {
        "ulysses": tuple(range(problem.cp_size)),
        "usp": tuple(range(size)),
        "usp_transposed": tuple(range(0, problem.cp_size, size)),
    }.get(schedule)
    if members is None:
        raise ValueError(f"schedule {schedule!r} is unknown; choose ring, double_ring, ulysses, usp or usp_transposed")
    shared_by = len(members)
    inner = _inner_passes(problem, exchange, speeds, across, shared_by)
    part = _shards(problem, exchange, Ring(cp_size=problem.cp_size, node_size=problem.cp_size), 1)
    # A KV head that several ranks share is sent to each of them.
    kv_heads = max(problem.kv_heads, shared_by)
    whole = Shards(
        batch=part.batch, tokens=part.tokens * shared_by, heads=part.heads // shared_by,
        kv_heads=kv_heads // shared_by, head_dim=part.head_dim, input_bytes=part.input_bytes,
        intra_node=part.intra_node, inter_node=part.inter_node,
    )  # fmt: skip
    sent = all_to_all_bytes(members, members[0], size, whole, gathered=True, packed=False)
    passes = []
    for call, around in zip((sent.forward, sent.backward), inner, strict=True):
        near, far = call.near / (speeds.inside_gib * GIB), call.far / (across * GIB)
        exposed = 1 / exchange.head_chunks  # the rest overlaps with the kernels of another chunk
        passes.append(around + Pass(kernels=0.0, inside=near * exposed, across=far * exposed))
    return passes[0], passes[1]


def _inner_passes(
    problem: AttentionProblem, exchange: Exchange, speeds: Speeds, across: float, shared_by: int
) -> tuple[Pass, Pass]:
    """What each rank computes on its share of the heads."""
    if shared_by == problem.cp_size:
        return _alone(problem, speeds, False), _alone(problem, speeds, True)
    size, nodes = problem.node_size, problem.nodes
    if exchange.schedule == "usp":
        groups = tuple(tuple(range(node * size, (node + 1) * size)) for node in range(nodes))
        ring = Ring(cp_size=nodes, node_size=1)
    else:
        groups = tuple(tuple(range(local, problem.cp_size, size)) for local in range(size))
        ring = Ring(cp_size=size, node_size=size)
    layout = Gathered(problem.layout, groups)
    return _ring_passes(problem, exchange, speeds, across, ring, layout, shared_by)
