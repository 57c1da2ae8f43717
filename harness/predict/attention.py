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
from harness.metrics.hardware import Speeds
from harness.metrics.throughput import GIB
from harness.predict.speeds import TERA

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

    def shards(self, gradient_bytes: int, *, tokens: int, shared_by: int = 1) -> Shards:
        """Of a rank that holds `tokens` of the sequence and `1 / shared_by` of the heads, at least one of each kind."""
        widths = Widths(unreduced=gradient_bytes, summed=gradient_bytes)
        return Shards(
            batch=self.batch, tokens=tokens, heads=max(1, self.heads // shared_by),
            kv_heads=max(1, self.kv_heads // shared_by), head_dim=self.head_dim, input_bytes=self.input_bytes,
            intra_node=widths, inter_node=widths,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """How a method moves chunks and heads."""

    schedule: str  # ring, double_ring, ulysses, usp or usp_transposed
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


def within_a_node(schedule: str) -> str:
    """What a schedule is where nothing lies between nodes."""
    return {"double_ring": "ring", "usp": "ulysses", "usp_transposed": "ring"}.get(schedule, schedule)


def attention_passes(problem: AttentionProblem, exchange: Exchange, speeds: Speeds) -> tuple[Pass, Pass]:
    """Forward and backward of one layer's attention. Raises ValueError for what the schedule cannot run."""
    across = speeds.across_gib if exchange.tuned_links else speeds.across_default_gib
    if problem.cp_size == 1:
        return _alone(problem, speeds, False), _alone(problem, speeds, True)
    if exchange.schedule in ("ring", "double_ring"):
        size = problem.cp_size if exchange.schedule == "ring" else problem.node_size
        ring = Ring(cp_size=problem.cp_size, node_size=size)
        return _RingOfRanks(
            problem=problem, exchange=exchange, speeds=speeds, across=across, ring=ring, layout=problem.layout
        ).passes()
    return _all_to_all_passes(problem, exchange, speeds, across)


def _alone(problem: AttentionProblem, speeds: Speeds, backward: bool) -> Pass:
    flops = problem.pair_flops * problem.mask.area(problem.seq_len) / problem.cp_size
    return Pass(kernels=_kernel_seconds(flops, speeds, backward))


def _kernel_seconds(forward_flops: float, speeds: Speeds, backward: bool) -> float:
    if backward:
        return ATTENTION_KERNEL_BACKWARD * forward_flops / (speeds.attention_backward_tflops * TERA)
    return forward_flops / (speeds.attention_forward_tflops * TERA)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RingOfRanks:
    """A ring whose ranks each hold `1 / shared_by` of the heads, over links of GiB/s inside nodes and between them."""

    problem: AttentionProblem
    exchange: Exchange
    speeds: Speeds
    across: float
    ring: Ring
    layout: Layout
    shared_by: int = 1

    @property
    def spans(self) -> bool:
        """Whether it is a flat ring over nodes: one rank of a node sends to the next, and all ranks wait for it."""
        return self.ring.nodes == 1 and self.problem.nodes > 1

    def passes(self) -> tuple[Pass, Pass]:
        """Forward and backward of the slowest of a few ranks."""
        ranks = sorted({0, self.ring.cp_size // 2, self.ring.cp_size - 1})
        forward, backward = (
            max((self._simulated(rank, backward) for rank in ranks), key=lambda each: each.seconds)
            for backward in (False, True)
        )
        return forward, backward

    def _simulated(self, rank: int, backward: bool) -> Pass:
        problem, ring = self.problem, self.ring
        sends_queries = backward and self.exchange.backward == "query"
        plan = comm_plan(problem.mask, self.layout, ring, problem.seq_len, rank, sends_queries)
        areas = _areas(problem.mask, self.layout, problem.seq_len, ring, rank, sends_queries)
        part = problem.shards(
            self.exchange.gradient_bytes, tokens=problem.seq_len // ring.cp_size, shared_by=self.shared_by
        )
        chunk_bytes = part.sent_side(sends_queries) if backward else 2 * part.key
        gradient_bytes = part.gradient(sends_queries, self.exchange.gradient_bytes) if backward else 0
        inside = self.across if self.spans else self.speeds.inside_gib
        clock = _Clock(inside=inside * GIB, across=self.across * GIB)
        flops_of_pair = problem.pair_flops / self.shared_by
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
                seconds = _kernel_seconds(flops_of_pair * area, self.speeds, backward)
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


class _Clock:
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
        raise ValueError(
            f"schedule {schedule!r} is unknown to the prediction; choose ring, double_ring, ulysses, usp or "
            "usp_transposed"
        )
    shared_by = len(members)
    inner = _inner_passes(problem, exchange, speeds, across, shared_by)
    # All tokens of the members, with the heads of one; a KV head that several ranks share is sent to each of them.
    tokens = problem.seq_len // problem.cp_size * shared_by
    whole = problem.shards(exchange.gradient_bytes, tokens=tokens, shared_by=shared_by)
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
    return _RingOfRanks(
        problem=problem, exchange=exchange, speeds=speeds, across=across, ring=ring,
        layout=Gathered(problem.layout, groups), shared_by=shared_by,
    ).passes()  # fmt: skip
