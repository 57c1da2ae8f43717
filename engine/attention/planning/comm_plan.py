"""One rank's tiles at every step of a ring, and the tokens that are sent for them: computed once per problem.

Integer code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from engine.attention.accumulate import WAITING_PARTS
from engine.attention.geometry.layout import Layout
from engine.attention.geometry.ring import Ring, RingTraffic
from engine.attention.geometry.tiles import Band, Tile
from engine.attention.masks import Mask, rank_pair_tiles

TokenRange = tuple[int, int]  # of a shard's local tokens; (0, 0) for none


@dataclass(frozen=True, slots=True)
class ChunkRanges:
    """Which tokens of the chunks are needed where, between the local ranks of one inner ring."""

    used: dict[tuple[int, int], TokenRange]  # (owner, worker) -> the owner's local tokens that the worker's tiles touch
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


@dataclass(frozen=True, slots=True)
class CommPlan:
    """One rank's work along a ring: the steps with their tiles, and the token ranges sent in each inner ring."""

    steps: tuple[RingStep, ...]
    inner_rings: tuple[ChunkRanges, ...]  # by outer step
    leaving: tuple[
        TokenRange, ...
    ]  # by outer step, tokens that later nodes need of the chunk that this rank then holds
    given: tuple[TokenRange, ...]  # by outer step, the tokens of that chunk whose gradients this rank's node computes
    given_unreduced: tuple[bool, ...]  # by outer step, those gradients are as kernels wrote them
    returned: tuple[TokenRange, ...]  # by outer step, this rank's own tokens whose gradients the node of the chunk then
    returned_unreduced: tuple[bool, ...]  # computes, and whether those are as kernels wrote them


@lru_cache(maxsize=256)
def comm_plan(mask: Mask, layout: Layout, ring: Ring, seq_len: int, cp_rank: int, sends_queries: bool) -> CommPlan:
    """Tiles and sent tokens of `cp_rank` when the query side's chunks, or the key side's, move along `ring`."""

    def tiles(owner: int, worker: int) -> tuple[Tile, ...]:
        q_rank, k_rank = (owner, worker) if sends_queries else (worker, owner)
        return rank_pair_tiles(mask, layout, seq_len, ring.cp_size, q_rank, k_rank)

    def sides(owner: int, worker: int) -> list[slice]:
        """The owner's local tokens in each tile that the worker computes."""
        return [tile.q if sends_queries else tile.k for tile in tiles(owner, worker)]

    def used(owner: int, worker: int) -> TokenRange:
        return _hull((side.start, side.stop) for side in sides(owner, worker))

    def used_in_node(owner: int, outer_step: int) -> list[slice]:
        """Tokens of `owner` in each tile of the node that holds its chunk in `outer_step`."""
        first = (owner // ring.node_size + outer_step) % ring.nodes * ring.node_size
        return [side for worker in range(first, first + ring.node_size) for side in sides(owner, worker)]

    def touched(owner: int, outer_step: int) -> TokenRange:
        return _hull((side.start, side.stop) for side in used_in_node(owner, outer_step))

    def unreduced_across(owner: int, outer_step: int) -> bool:
        return ring.node_size == 1 and _disjoint(used_in_node(owner, outer_step))  # a node's ranks sum their gradients

    def needed(owner: int, outer_step: int) -> TokenRange:
        """Tokens of `owner` that are needed in `outer_step` or later."""
        return _hull(touched(owner, later) for later in range(outer_step, ring.nodes))

    node, local_rank = divmod(cp_rank, ring.node_size)

    def owner_at(outer_step: int, at: int = local_rank) -> int:
        """CP rank whose chunk local rank `at` of this node holds at the start of `outer_step`."""
        return (node - outer_step) % ring.nodes * ring.node_size + at

    def chunk_ranges(outer_step: int) -> ChunkRanges:
        owners, workers = owner_at(outer_step, 0), node * ring.node_size
        ranges, unreduced = {}, {}
        for owner, worker in itertools.product(range(ring.node_size), repeat=2):
            ranges[owner, worker] = used(owners + owner, workers + worker)
            unreduced[owner, worker] = _disjoint(sides(owners + owner, workers + worker))
        between = [pair for pair in ranges if pair[0] != pair[1]]
        held = tuple(needed(owner_at(outer_step, at), outer_step) for at in range(ring.node_size))
        return ChunkRanges(
            ranges,
            unreduced,
            longest=max((length(ranges[pair]) for pair in between), default=0),
            all_unreduced=all(unreduced[pair] for pair in between),
            held=held if outer_step else None,
        )

    def step(index: int) -> RingStep:
        owner = ring.owner(cp_rank, index)
        work = tuple((tile.q, tile.k, tile.band) for tile in tiles(owner, cp_rank))
        return RingStep(owner, *divmod(index, ring.node_size), work)

    outer_steps = range(ring.nodes)
    return CommPlan(
        steps=tuple(step(index) for index in range(ring.cp_size)),
        inner_rings=tuple(chunk_ranges(outer_step) for outer_step in outer_steps),
        leaving=tuple(needed(owner_at(outer_step), outer_step + 1) for outer_step in outer_steps[:-1]),
        given=tuple(touched(owner_at(outer_step), outer_step) for outer_step in outer_steps),
        given_unreduced=tuple(unreduced_across(owner_at(outer_step), outer_step) for outer_step in outer_steps),
        returned=tuple(touched(cp_rank, outer_step) for outer_step in outer_steps),
        returned_unreduced=tuple(unreduced_across(cp_rank, outer_step) for outer_step in outer_steps),
    )


def _disjoint(tokens: list[slice]) -> bool:
    """No token is in two of these tiles, and all their gradients can be held until they are sent."""
    ordered = sorted((side.start, side.stop) for side in tokens)
    apart = all(before[1] <= after[0] for before, after in itertools.pairwise(ordered))
    return apart and len(tokens) <= WAITING_PARTS


def length(tokens: TokenRange) -> int:
    """How many tokens a range holds."""
    return tokens[1] - tokens[0]


def _hull(ranges: Iterable[TokenRange]) -> TokenRange:
    """The shortest range that holds all of them."""
    filled = [(start, stop) for start, stop in ranges if stop > start]
    return (min(start for start, _ in filled), max(stop for _, stop in filled)) if filled else (0, 0)


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
    work = comm_plan(mask, layout, ring, seq_len, rank, sends_queries=False)
    local_rank, tokens = rank % ring.node_size, seq_len // ring.cp_size
    others = [owner for owner in range(ring.node_size) if owner != local_rank]
    near = sum(length(ranges.used[owner, local_rank]) for ranges in work.inner_rings for owner in others)
    far = sum(length(ranges.held[local_rank]) for ranges in work.inner_rings if ranges.held)
    steps = sum(bool(step.tiles) for step in work.steps)
    return (
        steps / ring.cp_size,
        near / max(1, tokens * ring.nodes * (ring.node_size - 1)),
        far / max(1, tokens * (ring.nodes - 1)),
    )


@lru_cache(maxsize=256)
def reach(mask: Mask, layout: Layout, cp_size: int, seq_len: int) -> int:
    """Local keys [0, reach) of every shard are all that any rank needs of it."""
    pairs = itertools.product(range(cp_size), repeat=2)
    tiles = itertools.chain.from_iterable(rank_pair_tiles(mask, layout, seq_len, cp_size, q, k) for q, k in pairs)
    return max((tile.k_stop for tile in tiles), default=0)
