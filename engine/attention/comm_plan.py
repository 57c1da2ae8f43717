"""One rank's tiles at every step of a ring, and the tokens that are sent for them: computed once per problem.

Integer code. What is sent between other ranks comes from a table of all pairs (`engine.attention.masks.pairs`);
tiles are formed for this rank's own steps alone, each when it is first reached: while the device computes the step
before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.layout import Contiguous, Layout, Ring
from engine.attention.geometry.tiles import Call, Integers
from engine.attention.masks import Mask, TooManyTiles
from engine.attention.masks.pairs import PairTable, pair_table

TokenRange = tuple[int, int]  # of a shard's local tokens; (0, 0) for none


@dataclass(frozen=True, slots=True)
class ChunkRanges:
    """Which tokens of the chunks are needed where, between the local ranks of one inner ring."""

    # By (owner, worker), where one of them is this rank.
    used: dict[tuple[int, int], TokenRange]  # the owner's local tokens that the worker's tiles touch
    unreduced: dict[tuple[int, int], bool]  # the worker's gradient is as kernels wrote it: no token of it is a sum
    longest: int  # most tokens any local rank sends to another
    all_unreduced: bool  # no gradient between local ranks is a sum
    held: tuple[TokenRange, ...] | None = None  # by local rank, the part of its chunk at the start; None: all of it


@dataclass(frozen=True)
class RingStep:
    """One step of a ring: the chunk that this rank holds, and the kernel calls on it."""

    owner: int  # CP rank of the chunk
    outer_step: int  # the double ring's step between nodes; 0 on a flat ring
    inner_step: int  # the step inside the node
    _pairs: PairTable
    _ranks: tuple[int, int]  # of queries and keys

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """The kernel calls: one tile each, or the tiles of many documents."""
        return self._pairs.calls(*self._ranks)


@dataclass(frozen=True)
class CommPlan:
    """One rank's work along a ring: the steps with their tiles, and the token ranges sent in each inner ring."""

    # By outer step; "unreduced": the gradients are as kernels wrote them.
    leaving: tuple[TokenRange, ...]  # tokens of the chunk that this rank then holds which later nodes need
    given: tuple[TokenRange, ...]  # tokens of that chunk whose gradients this rank's node computes
    given_unreduced: tuple[bool, ...]
    returned: tuple[TokenRange, ...]  # this rank's own tokens whose gradients the node that then has them computes
    returned_unreduced: tuple[bool, ...]
    tables: RingTables  # of all ranks
    _cp_rank: int

    @cached_property
    def inner_rings(self) -> tuple[ChunkRanges, ...]:
        """By outer step, what the ranks of this rank's node then need of the chunks that they hold."""
        return _inner_rings(self.tables, self._cp_rank)

    @cached_property
    def steps(self) -> tuple[RingStep, ...]:
        """This rank's kernel calls, step by step."""
        tables, ring, rank = self.tables, self.tables.ring, self._cp_rank

        def step(index: int) -> RingStep:
            owner = ring.owner(rank, index)
            pair = (owner, rank) if tables.sends_queries else (rank, owner)
            return RingStep(owner, *divmod(index, ring.node_size), tables.pairs, pair)

        return tuple(map(step, range(ring.cp_size)))


@dataclass(frozen=True, eq=False)
class RingTables:
    """What all ranks' plans along one ring share; the arrays are by CP rank, and ranges are [..., start and stop]."""

    ring: Ring
    sends_queries: bool
    pairs: PairTable
    used: Integers  # [owners, workers]: tokens of the owner that the worker's tiles touch
    unreduced: NDArray[np.bool_]  # [owners, workers]
    touched: Integers  # [owners, outer steps]: by the node that holds the owner's chunk then
    needed: Integers  # [owners, outer steps]: then or later
    unreduced_across: NDArray[np.bool_]  # [owners, outer steps]

    @cached_property
    def in_nodes(self) -> tuple[list[list[int]], list[list[bool]]]:
        """[nodes that compute, nodes that own]: most tokens that a rank of the node sends another one of such a chunk,
        and whether no gradient between them is a sum."""
        size, nodes = self.ring.node_size, self.ring.nodes
        shape = (nodes, size, nodes, size)  # owners' nodes and local ranks, workers' nodes and local ranks
        own = np.eye(size, dtype=bool)[None, :, None, :]
        lengths = (self.used[..., 1] - self.used[..., 0]).reshape(shape)
        longest: Integers = np.where(own, 0, lengths).max(axis=(1, 3))
        sums: NDArray[np.bool_] = np.asarray((~self.unreduced.reshape(shape) & ~own).any(axis=(1, 3)))
        return longest.T.tolist(), (~sums).T.tolist()


@lru_cache(maxsize=64)
def ring_tables(mask: Mask, layout: Layout, ring: Ring, seq_len: int, sends_queries: bool) -> RingTables:
    """Those of one side that is sent along a ring."""
    pairs = pair_table(mask, layout, seq_len, ring.cp_size)
    side = pairs.queries if sends_queries else pairs.keys
    used, unreduced = np.stack((side.start, side.stop), axis=-1), side.unreduced
    if not sends_queries:
        used, unreduced = used.swapaxes(0, 1), unreduced.T  # the worker has the queries
    nodes, size = ring.nodes, ring.node_size
    by_node = _hulls(used.reshape(ring.cp_size, nodes, size, 2), axis=2)
    owners = np.arange(ring.cp_size)[:, None]
    outer_steps = np.arange(nodes)
    node_then = (owners // size + outer_steps) % nodes
    touched = by_node[owners, node_then]
    needed = _later_hulls(touched)
    across = unreduced[owners, node_then] if size == 1 else np.zeros((ring.cp_size, nodes), dtype=bool)
    return RingTables(ring, sends_queries, pairs, used, unreduced, touched, needed, across)


def _hulls(ranges: Integers, axis: int) -> Integers:
    """The shortest ranges that hold all ranges along an axis; (0, 0) where all are empty."""
    filled = ranges[..., 1] > ranges[..., 0]
    start = np.where(filled, ranges[..., 0], np.iinfo(np.int64).max).min(axis=axis)
    stop = np.where(filled, ranges[..., 1], 0).max(axis=axis)
    return np.stack((np.where(stop > 0, start, 0), stop), axis=-1)


def _later_hulls(ranges: Integers) -> Integers:
    """For each range along axis 1, the hull of it and all later ones; (0, 0) where all are empty."""
    filled = ranges[..., 1] > ranges[..., 0]
    start = np.where(filled, ranges[..., 0], np.iinfo(np.int64).max)[:, ::-1]
    start = np.minimum.accumulate(start, axis=1)[:, ::-1]
    stop = np.maximum.accumulate(np.where(filled, ranges[..., 1], 0)[:, ::-1], axis=1)[:, ::-1]
    return np.stack((np.where(stop > 0, start, 0), stop), axis=-1)


def _ranges(of_steps: Integers) -> tuple[TokenRange, ...]:
    return tuple((start, stop) for start, stop in of_steps.tolist())


@lru_cache(maxsize=256)
def comm_plan(mask: Mask, layout: Layout, ring: Ring, seq_len: int, cp_rank: int, sends_queries: bool) -> CommPlan:
    """Tiles and sent tokens of `cp_rank` when the query side's chunks, or the key side's, move along `ring`."""
    tables = ring_tables(mask, layout, ring, seq_len, sends_queries)
    outer_steps, held = chunks_held(ring, cp_rank)
    return CommPlan(
        leaving=_ranges(tables.needed[held[:-1], outer_steps[1:]]),
        given=_ranges(tables.touched[held, outer_steps]),
        given_unreduced=tuple(tables.unreduced_across[held, outer_steps].tolist()),
        returned=_ranges(tables.touched[cp_rank]),
        returned_unreduced=tuple(tables.unreduced_across[cp_rank].tolist()),
        tables=tables,
        _cp_rank=cp_rank,
    )


@lru_cache(maxsize=1024)
def chunks_held(ring: Ring, cp_rank: int) -> tuple[Integers, Integers]:
    """The outer steps, and whose chunk `cp_rank` holds at the start of each."""
    (node, local_rank), outer_steps = divmod(cp_rank, ring.node_size), np.arange(ring.nodes)
    return outer_steps, (node - outer_steps) % ring.nodes * ring.node_size + local_rank


def _inner_rings(tables: RingTables, cp_rank: int) -> tuple[ChunkRanges, ...]:
    """Between the ranks of this rank's node, whose chunks are in each outer step those of another node."""
    size, nodes = tables.ring.node_size, tables.ring.nodes
    node, here = divmod(cp_rank, size)
    workers, nodes_held = slice(node * size, (node + 1) * size), (node - np.arange(nodes)) % nodes
    owners = nodes_held[:, None] * size + np.arange(size)
    pairs = [*((here, worker) for worker in range(size)), *((owner, here) for owner in range(size))]
    used = np.concatenate((tables.used[owners[:, here], workers], tables.used[owners, cp_rank]), axis=1)
    unreduced = np.concatenate((tables.unreduced[owners[:, here], workers], tables.unreduced[owners, cp_rank]), axis=1)
    used, unreduced = used.tolist(), unreduced.tolist()
    held = tables.needed[owners, np.arange(nodes)[:, None]].tolist()
    longest, all_unreduced = tables.in_nodes[0][node], tables.in_nodes[1][node]
    return tuple(
        ChunkRanges(
            dict(zip(pairs, map(tuple, used[step]), strict=True)),
            dict(zip(pairs, unreduced[step], strict=True)),
            longest=longest[owning],
            all_unreduced=all_unreduced[owning],
            held=tuple(map(tuple, held[step])) if step else None,
        )
        for step, owning in enumerate(nodes_held.tolist())
    )


@dataclass(frozen=True, slots=True)
class RingTraffic:
    """Steps and bytes of a ring that a mask leaves, as fractions: 1 where every rank needs all of every chunk."""

    steps: float = 1.0  # with work, over all steps
    near: float = 1.0  # tokens a rank receives from ranks of its node, over those of their chunks
    far: float = 1.0  # the same from other nodes
    calls: float = 1.0  # kernel calls of a step with work
    whole_calls: float = 1.0  # of one rank that has the whole sequence


def length(tokens: TokenRange) -> int:
    """How many tokens a range holds."""
    return tokens[1] - tokens[0]


def traffic_left(
    mask: Mask, layout: Layout, cp_size: int, node_size: int, seq_len: int, every_rank: bool = False
) -> RingTraffic:
    """The share of a ring's steps and bytes that the mask leaves: near of a flat ring, far of a double ring."""
    flat, double = (
        ring_traffic(mask, layout, Ring(cp_size=cp_size, node_size=size), seq_len, every_rank)
        for size in (cp_size, node_size)
    )
    return replace(flat, far=double.far)


@lru_cache(maxsize=256)
def ring_traffic(mask: Mask, layout: Layout, ring: Ring, seq_len: int, every_rank: bool = False) -> RingTraffic:
    """Of the busiest of a few ranks, with K and V sent. A causal mask leaves that rank everything, a short window over
    contiguous shards two steps and few bytes. `every_rank`: of all ranks, which differ where documents do."""
    tables, size, nodes = ring_tables(mask, layout, ring, seq_len, False), ring.node_size, ring.nodes
    owners = np.arange(ring.cp_size)[:, None]
    ranks = owners[:, 0] if every_rank else np.array([0, ring.cp_size // 2, ring.cp_size - 1])
    lengths = tables.used[:, ranks, 1] - tables.used[:, ranks, 0]  # [owners, ranks]
    outer_steps = np.arange(1, nodes)
    held = (ranks[:, None] - outer_steps * size) % ring.cp_size  # [ranks, outer steps]
    arrived = tables.needed[held, outer_steps]
    near = np.where(owners % size != ranks % size, lengths, 0).sum(axis=0).max()
    far = (arrived[..., 1] - arrived[..., 0]).sum(axis=1).max()
    tokens, steps = seq_len // ring.cp_size, (lengths > 0).sum(axis=0).max()
    # Of a rank's own chunk and of its neighbour's, which is the most like the others.
    counted = {0} if tables.pairs.one_by_one else set(ranks.tolist())
    own, other = (max(tables.pairs.call_count(rank, (rank - by) % ring.cp_size) for rank in counted) for by in (0, 1))
    return RingTraffic(
        int(steps) / ring.cp_size,
        int(near) / max(1, tokens * nodes * (size - 1)),
        int(far) / max(1, tokens * (nodes - 1)),
        max(1.0, (own + (int(steps) - 1) * other) / max(1, int(steps))),
        _calls_of_whole(mask, seq_len) if ring.cp_size > 1 else float(own),
    )


@lru_cache(maxsize=256)
def _calls_of_whole(mask: Mask, seq_len: int) -> float:
    """Kernel calls of one rank that has the whole sequence; inf where they would be too many."""
    try:
        return float(max(1, pair_table(mask, Contiguous(), seq_len, 1).call_count(0, 0)))
    except TooManyTiles:
        return math.inf


@lru_cache(maxsize=256)
def reach(mask: Mask, layout: Layout, cp_size: int, seq_len: int) -> int:
    """Local keys [0, reach) of every shard are all that any rank needs of it."""
    return int(pair_table(mask, layout, seq_len, cp_size).keys.stop.max())
