"""Bytes that must cross between nodes for a mask under a layout, by schedule. Integer code.

They are counted from the plans that the engine runs, so they follow the mask: a window over contiguous shards sends to
the next node what its first queries see, a ring whose chunks no later node needs sends nothing on. Of what a schedule
leaves open the count takes what sends least: either side in backward, chunks forwarded or sent directly, gradients in
the inputs' dtype, head chunks without padding, and tensors saved in forward not sent again.

Counted is the node that sends most. Its ranks share the node's links, and a ring of all ranks lets one of them send
for all, so a node is what a link's speed can be held against.

From this follows a bound of a step's time that holds by construction:

    step >= needed / link,  needed = least bytes of the schedule that sends fewest,  link = the fastest speed seen

where `link` is no less than what the step itself sent between nodes divided by its seconds. A step under schedule r
sends `sent` bytes from its fullest node, and needed <= least(r) <= sent: the first because `needed` is a minimum over
all schedules of the engine, which its baselines run too, the second because a plan sends no less than the plan with
every open choice at its least. So needed / link <= needed / (sent / step) <= step. Compute costs nothing in it and
overlaps with every transfer; transfers inside a node are free. The steps are those of attention alone, without
recomputation in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from engine.attention.geometry.layout import Gathered, Layout
from engine.attention.geometry.ring import Ring
from engine.attention.masks import Mask
from engine.attention.planning.comm_plan import comm_plan
from engine.attention.planning.comm_volume import CallBytes, RingVolume, Shards, Widths, all_to_all_bytes
from engine.attention.planning.cost_model import (
    BACKWARD_SIDES,
    RING_SCHEDULES,
    ULYSSES_SCHEDULES,
    HeadsAndRanks,
    schedule_unsupported_reason,
)

# Up to so many ranks all nodes are counted; of more ranks, three nodes: the fullest of those is no fuller than the
# fullest of all, so what is needed comes out no larger.
ALL_RANKS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanningProblem(HeadsAndRanks):
    """Attention over a sequence whose ranks are on several nodes, as far as its bytes depend on it."""

    mask: Mask
    layout: Layout
    seq_len: int
    batch: int
    head_dim: int
    input_bytes: int  # per element of Q, K and V


@dataclass(frozen=True, slots=True, kw_only=True)
class InterNodeBytes:
    """Bytes that leave the node that sends most, in one forward and its backward."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@lru_cache(maxsize=1024)
def least_inter_node_bytes(problem: SpanningProblem) -> dict[str, InterNodeBytes]:
    """The least that each schedule able to run the problem sends between nodes, by schedule, fewest bytes first."""
    found = {}
    for schedule in RING_SCHEDULES + ULYSSES_SCHEDULES:
        if schedule_unsupported_reason(schedule, problem, problem.layout.name) is None:
            found[schedule] = min(map(_fullest, _ways(schedule, problem)), key=lambda each: each.total)
    return dict(sorted(found.items(), key=lambda pair: pair[1].total))


def _fullest(nodes: Sequence[CallBytes]) -> InterNodeBytes:
    """Of the counted nodes, the one that sends most to others."""
    fullest = max(nodes, key=lambda node: node.forward.far + node.backward.far)
    return InterNodeBytes(forward=fullest.forward.far, backward=fullest.backward.far)


def _ways(schedule: str, problem: SpanningProblem) -> Iterator[list[CallBytes]]:
    """Bytes of each counted node, in every way that a schedule leaves open."""
    nodes, size = range(problem.nodes), problem.node_size
    counted = nodes if problem.cp_size <= ALL_RANKS else (0, problem.nodes // 2, problem.nodes - 1)
    if schedule in ("ulysses", "usp_transposed"):
        for_all = schedule == "ulysses"
        part = _shards(problem, divided_by=problem.cp_size if for_all else problem.nodes)
        yield [_all_to_all(problem, node, part, for_all) for node in counted]
        return
    for side in BACKWARD_SIDES:
        if schedule == "usp":  # rings of one rank per node, on the heads that the all-to-all inside a node gives it
            ranks_of = tuple(tuple(range(node * size, (node + 1) * size)) for node in nodes)
            ring = Ring(cp_size=problem.nodes, node_size=1)
            volume = RingVolume(ring=ring, node_size=1, exchange="relay")
            layout, part = Gathered(problem.layout, ranks_of), _shards(problem, divided_by=size)
            yield [_times(_ring(problem, layout, volume, part, node, side), size) for node in counted]
            continue
        ring = Ring(cp_size=problem.cp_size, node_size=problem.cp_size if schedule == "ring" else size)
        # Inside a node an exchange pattern changes no byte between nodes: only a ring of all ranks has the choice.
        for exchange in ("relay", "direct") if schedule == "ring" else ("relay",):
            volume = RingVolume(ring=ring, node_size=size, exchange=exchange)
            part = _shards(problem, divided_by=1)
            yield [
                _sum(_ring(problem, problem.layout, volume, part, node * size + local, side) for local in range(size))
                for node in counted
            ]


def _ring(
    problem: SpanningProblem, layout: Layout, volume: RingVolume, part: Shards, rank: int, side: str
) -> CallBytes:
    """Of one rank along a ring."""
    forward, backward = (
        comm_plan(problem.mask, layout, volume.ring, problem.seq_len, rank, sends_queries)
        for sends_queries in (False, side == "query")
    )
    return volume.call_bytes(forward, backward, rank, part, side == "query")


def _all_to_all(problem: SpanningProblem, node: int, part: Shards, for_all: bool) -> CallBytes:
    """Of the ranks of one node, in an all-to-all among all ranks or among those at one place in every node."""
    size = problem.node_size
    return _sum(
        all_to_all_bytes(
            tuple(range(problem.cp_size) if for_all else range(local, problem.cp_size, size)),
            node * size + local,
            size,
            part,
            gathered=True,
            packed=False,
        )
        for local in range(size)
    )


def _shards(problem: SpanningProblem, *, divided_by: int) -> Shards:
    """One rank's shards where `divided_by` ranks divide the heads among them and hold each other's tokens."""
    narrow = Widths(unreduced=problem.input_bytes, summed=problem.input_bytes)
    return Shards(
        batch=problem.batch,
        tokens=problem.seq_len // problem.cp_size * divided_by,
        heads=problem.heads // divided_by,
        kv_heads=problem.kv_heads // divided_by,
        head_dim=problem.head_dim,
        input_bytes=problem.input_bytes,
        intra_node=narrow,
        inter_node=narrow,
    )


def _sum(calls: Iterator[CallBytes]) -> CallBytes:
    total = CallBytes()
    for call in calls:
        total = replace(total, forward=total.forward + call.forward, backward=total.backward + call.backward)
    return total


def _times(call: CallBytes, count: int) -> CallBytes:
    return CallBytes(call.forward.times(count), call.backward.times(count))
