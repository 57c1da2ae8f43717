"""One layer's attention, forward and backward, along the schedule that the engine runs.

A ring is simulated step by step on one rank: each kernel call waits for its chunk, and a chunk or gradient for its
link. Chunks, tiles and bytes come from the engine's own communication plans, so they follow mask and layout. The order
is that of `engine.attention.algorithms.ring`: transfers inside a node for the next step start with this one, those
between nodes with the outer step, and one chunk ahead may be held.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.attention.comm_plan import ChunkRanges, comm_plan, length
from engine.attention.comm_volume import all_to_all_bytes
from engine.attention.geometry.layout import Layout
from engine.attention.geometry.ring import Ring
from engine.attention.problem import ALL_GATHER, Problem, divided
from harness.metrics.hardware import HardwareSpeeds
from harness.metrics.throughput import GIB
from harness.predict.gathering import all_gather_passes
from harness.predict.problem import Exchange, Pass, kernel_seconds, step_areas


def attention_passes(problem: Problem, exchange: Exchange, speeds: HardwareSpeeds) -> tuple[Pass, Pass]:
    """Forward and backward of one layer's attention. Raises ValueError for what the schedule cannot run."""
    across = exchange.across_gib(speeds)
    if problem.cp_size == 1:
        return _alone(problem, speeds, False), _alone(problem, speeds, True)
    if exchange.schedule == ALL_GATHER:
        return all_gather_passes(problem, exchange, speeds, across)
    division = divided(exchange.schedule, problem.layout, problem.cp_size, problem.node_size)
    if division.ring.cp_size == 1:
        passes = _alone(problem, speeds, False), _alone(problem, speeds, True)
    else:
        passes = _RingOfRanks(
            problem=problem, exchange=exchange, speeds=speeds, across=across, ring=division.ring,
            layout=division.layout, shared_by=division.shared_by,
        ).passes()  # fmt: skip
    return _between_all_to_alls(passes, problem, exchange, speeds, across, division.members(0))


def _alone(problem: Problem, speeds: HardwareSpeeds, backward: bool) -> Pass:
    """All visible pairs in one call, of a share of the heads."""
    pairs = problem.mask.area(problem.seq_len)
    return Pass(kernels=kernel_seconds(problem.pair_flops * pairs / problem.cp_size, pairs, speeds, backward))


@dataclass(frozen=True, kw_only=True, slots=True)
class _RingOfRanks:
    """A ring whose ranks each hold `1 / shared_by` of the heads, over links of GiB/s inside nodes and between them."""

    problem: Problem
    exchange: Exchange
    speeds: HardwareSpeeds
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
        areas = step_areas(problem.mask, self.layout, problem.seq_len, ring, rank, sends_queries)
        part = self.exchange.shards(problem, self.shared_by)
        chunk_bytes = part.sent_side(sends_queries) if backward else 2 * part.key
        gradient_bytes = part.gradient(sends_queries, self.exchange.gradient_bytes) if backward else 0
        inside = self.across if self.spans else self.speeds.inside_gib
        clock = _FreeTimes(inside=inside * GIB, across=self.across * GIB)
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
                seconds = kernel_seconds(flops_of_pair * area, area, self.speeds, backward)
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
    inner: tuple[Pass, Pass],
    problem: Problem,
    exchange: Exchange,
    speeds: HardwareSpeeds,
    across: float,
    members: tuple[int, ...],
) -> tuple[Pass, Pass]:
    """Forward and backward with the heads exchanged among `members` around them; one member exchanges nothing."""
    if len(members) == 1:
        return inner
    # All tokens of the members, with the heads of one; a KV head that several ranks share is sent to each of them.
    whole = exchange.shards(problem, len(members))
    sent = all_to_all_bytes(members, members[0], problem.node_size, whole, gathered=True, packed=False)
    passes = []
    for call, around in zip((sent.forward, sent.backward), inner, strict=True):
        near, far = call.near / (speeds.inside_gib * GIB), call.far / (across * GIB)
        exposed = 1 / exchange.head_chunks  # the rest overlaps with the kernels of another chunk
        passes.append(around + Pass(kernels=0.0, inside=near * exposed, across=far * exposed))
    return passes[0], passes[1]
