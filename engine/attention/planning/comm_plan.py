"""One rank's tiles at every step of a ring, and the tokens that are sent for them: computed once per problem.

Integer code. What is sent between other ranks comes from a table of all pairs (`engine.attention.planning.pair_table`);
tiles are formed for this rank's own steps alone, when they are first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.attention.geometry.layout import Layout
from engine.attention.geometry.ring import Ring, RingTraffic
from engine.attention.geometry.shard_table import Integers
from engine.attention.geometry.tiles import Band
from engine.attention.masks import Mask
from engine.attention.planning.pair_table import PairTable, pair_table

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


@dataclass(frozen=True, slots=True)
class RingStep:
    """One step of a ring: the chunk that this rank holds, and the kernel calls on it."""

    owner: int  # CP rank of the chunk
    outer_step: int  # the double ring's step between nodes; 0 on a flat ring
    inner_step: int  # the step inside the node
    tiles: tuple[tuple[slice, slice, Band], ...]  # local query tokens, local key tokens, visible band


@dataclass(frozen=True)
class CommPlan:
    """One rank's work along a ring: the steps with their tiles, and the token ranges sent in each inner ring."""

    inner_rings: tuple[ChunkRanges, ...]  # by outer step
    leaving: tuple[
        TokenRange, ...
    ]  # by outer step, tokens that later nodes need of the chunk that this rank then holds
    given: tuple[TokenRange, ...]  # by outer step, the tokens of that chunk whose gradients this rank's node computes
    given_unreduced: tuple[bool, ...]  # by outer step, those gradients are as kernels wrote them
    returned: tuple[TokenRange, ...]  # by outer step, this rank's own tokens whose gradients the node of the chunk then
    returned_unreduced: tuple[bool, ...]  # computes, and whether those are as kernels wrote them
    _tables: _RingTables
    _cp_rank: int

    @cached_property
    def steps(self) -> tuple[RingStep, ...]:
        """This rank's kernel calls, step by step."""
        tables, ring = self._tables, self._tables.ring

        def step(index: int) -> RingStep:
            owner = ring.owner(self._cp_rank, index)
            pair = (owner, self._cp_rank) if tables.sends_queries else (self._cp_rank, owner)
            work = tuple((tile.q, tile.k, tile.band) for tile in tables.pairs.tiles(*pair))
            return RingStep(owner, *divmod(index, ring.node_size), work)

        return tuple(step(index) for index in range(ring.cp_size))


@dataclass(frozen=True, eq=False)
class _RingTables:
    """What all ranks' plans along one ring share; the arrays are by CP rank, and ranges are [..., start and stop]."""

    ring: Ring
    sends_queries: bool
    pairs: PairTable
    used: Integers  # [owners, workers]: tokens of the owner that the worker's tiles touch
    unreduced: NDArray[np.bool_]  # [owners, workers]
    touched: Integers  # [owners, outer steps]: by the node that holds the owner's chunk then
    needed: Integers  # [owners, outer steps]: then or later
    unreduced_across: NDArray[np.bool_]  # [owners, outer steps]


@lru_cache(maxsize=64)
def _ring_tables(mask: Mask, layout: Layout, ring: Ring, seq_len: int, sends_queries: bool) -> _RingTables:
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
    needed = np.stack([_hulls(touched[:, step:], axis=1) for step in outer_steps], axis=1)
    across = unreduced[owners, node_then] if size == 1 else np.zeros((ring.cp_size, nodes), dtype=bool)
    return _RingTables(ring, sends_queries, pairs, used, unreduced, touched, needed, across)


def _hulls(ranges: Integers, axis: int) -> Integers:
    """The shortest ranges that hold all ranges along an axis; (0, 0) where all are empty."""
    filled = ranges[..., 1] > ranges[..., 0]
    start = np.where(filled, ranges[..., 0], np.iinfo(np.int64).max).min(axis=axis)
    stop = np.where(filled, ranges[..., 1], 0).max(axis=axis)
    return np.stack((np.where(stop > 0, start, 0), stop), axis=-1)


def _ranges(of_steps: Integers) -> tuple[TokenRange, ...]:
    return tuple((start, stop) for start, stop in of_steps.tolist())


@lru_cache(maxsize=256)
def comm_plan(mask: Mask, layout: Layout, ring: Ring, seq_len: int, cp_rank: int, sends_queries: bool) -> CommPlan:
    """Tiles and sent tokens of `cp_rank` when the query side's chunks, or the key side's, move along `ring`."""
    tables = _ring_tables(mask, layout, ring, seq_len, sends_queries)
    (node, local_rank), size, nodes = divmod(cp_rank, ring.node_size), ring.node_size, ring.nodes
    outer_steps = np.arange(nodes)
    held_here = (node - outer_steps) % nodes * size + local_rank  # whose chunk this rank holds
    later = np.concatenate((tables.needed[:, 1:], np.zeros((ring.cp_size, 1, 2), dtype=np.int64)), axis=1)
    return CommPlan(
        inner_rings=tuple(_chunk_ranges(tables, cp_rank, outer_step) for outer_step in range(nodes)),
        leaving=_ranges(later[held_here, outer_steps][:-1]),
        given=_ranges(tables.touched[held_here, outer_steps]),
        given_unreduced=tuple(tables.unreduced_across[held_here, outer_steps].tolist()),
        returned=_ranges(tables.touched[cp_rank]),
        returned_unreduced=tuple(tables.unreduced_across[cp_rank].tolist()),
        _tables=tables,
        _cp_rank=cp_rank,
    )


def _chunk_ranges(tables: _RingTables, cp_rank: int, outer_step: int) -> ChunkRanges:
    """Between the ranks of this rank's node, whose chunks are then those of another node."""
    size, nodes = tables.ring.node_size, tables.ring.nodes
    node, here = divmod(cp_rank, size)
    first, workers = (node - outer_step) % nodes * size, slice(node * size, (node + 1) * size)
    used = tables.used[first : first + size, workers]
    unreduced = tables.unreduced[first : first + size, workers]
    between = ~np.eye(size, dtype=bool)
    lengths = used[..., 1] - used[..., 0]
    pairs = [*((here, worker) for worker in range(size)), *((owner, here) for owner in range(size))]
    return ChunkRanges(
        dict(zip(pairs, (*_ranges(used[here]), *_ranges(used[:, here])), strict=True)),
        dict(zip(pairs, (*unreduced[here].tolist(), *unreduced[:, here].tolist()), strict=True)),
        longest=int(lengths[between].max(initial=0)),
        all_unreduced=bool(unreduced[between].all()),
        held=_ranges(tables.needed[first : first + size, outer_step]) if outer_step else None,
    )


def length(tokens: TokenRange) -> int:
    """How many tokens a range holds."""
    return tokens[1] - tokens[0]


def traffic_left(mask: Mask, layout: Layout, cp_size: int, node_size: int, seq_len: int) -> RingTraffic:
    """The share of a ring's steps and bytes that the mask leaves: near of a flat ring, far of a double ring."""
    flat, double = (Ring(cp_size=cp_size, node_size=size) for size in (cp_size, node_size))
    return replace(ring_traffic(mask, layout, flat, seq_len), far=ring_traffic(mask, layout, double, seq_len).far)


@lru_cache(maxsize=256)
def ring_traffic(mask: Mask, layout: Layout, ring: Ring, seq_len: int) -> RingTraffic:
    """Of the busiest of a few ranks, with K and V sent. A causal mask leaves that rank everything, a short window over
    contiguous shards two steps and few bytes."""
    found = [_rank_traffic(mask, layout, ring, seq_len, rank) for rank in {0, ring.cp_size // 2, ring.cp_size - 1}]
    return RingTraffic(*(max(shares) for shares in zip(*found, strict=True)))


def _rank_traffic(mask: Mask, layout: Layout, ring: Ring, seq_len: int, rank: int) -> tuple[float, float, float]:
    tables = _ring_tables(mask, layout, ring, seq_len, False)
    (node, local_rank), size, nodes = divmod(rank, ring.node_size), ring.node_size, ring.nodes
    tokens, lengths = seq_len // ring.cp_size, (tables.used[:, rank, 1] - tables.used[:, rank, 0])
    others = np.arange(ring.cp_size) % size != local_rank
    outer_steps = np.arange(1, nodes)
    held = tables.needed[(node - outer_steps) % nodes * size + local_rank, outer_steps]
    near, far, steps = (int(each.sum()) for each in (lengths[others], held[:, 1] - held[:, 0], lengths > 0))
    return (
        steps / ring.cp_size,
        near / max(1, tokens * nodes * (size - 1)),
        far / max(1, tokens * (nodes - 1)),
    )


@lru_cache(maxsize=256)
def reach(mask: Mask, layout: Layout, cp_size: int, seq_len: int) -> int:
    """Local keys [0, reach) of every shard are all that any rank needs of it."""
    return int(pair_table(mask, layout, seq_len, cp_size).keys.stop.max())
