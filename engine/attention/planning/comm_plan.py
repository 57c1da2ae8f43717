"""What one rank does at every stop of a ring, and what backward_side for it: computed once per problem. Integer code."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from engine.attention.accumulate.spans import WAITING_PARTS
from engine.attention.geometry.layout import Layout
from engine.attention.geometry.ring import Ring, RingTraffic
from engine.attention.geometry.tiles import Tile
from engine.attention.masks import Mask, meeting

TokenRange = tuple[int, int]  # of a shard's local tokens; (0, 0) for none


@dataclass(frozen=True, slots=True)
class ChunkRanges:
    """Which tokens of travelling shards are needed where, between the slots of one lap."""

    ranges: dict[tuple[int, int], TokenRange]  # (owner, host) -> the owner's local tokens
    unreduced: dict[tuple[int, int], bool]  # the visiting gradient is as kernels wrote it: no token of it is a sum
    longest: int  # most tokens any slot is sent by another
    all_unreduced: bool  # no visiting gradient between slots is a sum
    held: tuple[TokenRange, ...] | None = (
        None  # by slot, what of its shard is there when the lap starts; None: all of it
    )

    def visit(self, owner: int, host: int) -> TokenRange:
        """TokenRange of the owner's local tokens that the host's work touches: (0, 0) when it touches none."""
        return self.ranges[owner, host]


@dataclass(frozen=True, slots=True)
class CommPlan:
    """One rank's work: tiles against every owner's shard, and the needs of each lap."""

    tiles: tuple[tuple[Tile, ...], ...]  # by owner
    inner_rings: tuple[ChunkRanges, ...]  # by cycle
    leaving: tuple[TokenRange, ...]  # by cycle, what the nodes to come need of the shard that this rank then holds
    given: tuple[TokenRange, ...]  # by cycle, the tokens of that shard whose gradients this rank's node forms
    given_unreduced: tuple[bool, ...]  # by cycle, those gradients are as kernels wrote them
    returned: tuple[TokenRange, ...]  # by cycle, this rank's own tokens whose gradients the node then visited forms
    returned_unreduced: tuple[bool, ...]


@lru_cache(maxsize=256)
def comm_plan(mask: Mask, layout: Layout, ring: Ring, seq_len: int, cp_rank: int, sends_queries: bool) -> CommPlan:
    """What `cp_rank` does when shards travel `ring`: the query side's or the key side's."""

    def tiles(visitor: int, host: int) -> tuple[Tile, ...]:
        q_rank, k_rank = (visitor, host) if sends_queries else (host, visitor)
        return meeting(mask, layout, seq_len, ring.cp_size, q_rank, k_rank)

    def met_by(visitor: int, host: int) -> TokenRange:
        return _hull((side.start, side.stop) for side in sides(visitor, host))

    def sides(visitor: int, host: int) -> list[slice]:
        return [tile.q if sends_queries else tile.k for tile in tiles(visitor, host)]

    def met_in(owner: int, outer_step: int) -> list[slice]:
        """Tokens of `owner` in each tile of the node that its shard visits in `cycle`."""
        first = (owner // ring.node_size + outer_step) % ring.nodes * ring.node_size
        return [side for host in range(first, first + ring.node_size) for side in sides(owner, host)]

    def touched(owner: int, outer_step: int) -> TokenRange:
        return _hull((side.start, side.stop) for side in met_in(owner, outer_step))

    def unreduced_across(owner: int, outer_step: int) -> bool:
        return ring.node_size == 1 and _unsummed(met_in(owner, outer_step))  # the ranks of a node add theirs up

    def needed(owner: int, outer_step: int) -> TokenRange:
        """Tokens of `owner` that are needed in `cycle` or later."""
        return _hull(touched(owner, later) for later in range(outer_step, ring.nodes))

    node, slot = divmod(cp_rank, ring.node_size)

    def holder(outer_step: int, at: int = slot) -> int:
        """CP rank whose shard slot `at` of this node holds in `cycle`."""
        return (node - outer_step) % ring.nodes * ring.node_size + at

    def needs(outer_step: int) -> ChunkRanges:
        visitors, hosts = holder(outer_step, 0), node * ring.node_size
        ranges, unreduced = {}, {}
        for owner, host in itertools.product(range(ring.node_size), repeat=2):
            ranges[owner, host] = met_by(visitors + owner, hosts + host)
            unreduced[owner, host] = _unsummed(sides(visitors + owner, hosts + host))
        between = [pair for pair in ranges if pair[0] != pair[1]]
        return ChunkRanges(
            ranges,
            unreduced,
            longest=max((length(ranges[pair]) for pair in between), default=0),
            all_unreduced=all(unreduced[pair] for pair in between),
            held=tuple(needed(holder(outer_step, at), outer_step) for at in range(ring.node_size))
            if outer_step
            else None,
        )

    return CommPlan(
        tiles=tuple(tiles(owner, cp_rank) for owner in range(ring.cp_size)),
        inner_rings=tuple(needs(outer_step) for outer_step in range(ring.nodes)),
        leaving=tuple(needed(holder(outer_step), outer_step + 1) for outer_step in range(ring.nodes - 1)),
        given=tuple(touched(holder(outer_step), outer_step) for outer_step in range(ring.nodes)),
        given_unreduced=tuple(unreduced_across(holder(outer_step), outer_step) for outer_step in range(ring.nodes)),
        returned=tuple(touched(cp_rank, outer_step) for outer_step in range(ring.nodes)),
        returned_unreduced=tuple(unreduced_across(cp_rank, outer_step) for outer_step in range(ring.nodes)),
    )


def _unsummed(tokens: list[slice]) -> bool:
    """No token is in two of these tiles, and their gradients wait side by side until they leave."""
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
    """What of a ring's stops and bytes the mask leaves: near of a flat circle, far of one across nodes."""
    flat, double = (Ring(cp_size=cp_size, node_size=size) for size in (cp_size, node_size))
    return replace(ring_traffic(mask, layout, flat, seq_len), far=ring_traffic(mask, layout, double, seq_len).far)


@lru_cache(maxsize=256)
def ring_traffic(mask: Mask, layout: Layout, ring: Ring, seq_len: int) -> RingTraffic:
    """Of the busiest of a few ranks, keys and values travelling. A causal mask leaves that rank everything, a short
    window over contiguous shards two stops and little of either."""
    found = [_rank_traffic(mask, layout, ring, seq_len, rank) for rank in {0, ring.cp_size // 2, ring.cp_size - 1}]
    return RingTraffic(*(max(shares) for shares in zip(*found, strict=True)))


def _rank_traffic(mask: Mask, layout: Layout, ring: Ring, seq_len: int, rank: int) -> tuple[float, float, float]:
    work = comm_plan(mask, layout, ring, seq_len, rank, sends_queries=False)
    slot, tokens = rank % ring.node_size, seq_len // ring.cp_size
    others = [owner for owner in range(ring.node_size) if owner != slot]
    near = sum(length(inner_ring.visit(owner, slot)) for inner_ring in work.inner_rings for owner in others)
    far = sum(length(inner_ring.held[slot]) for inner_ring in work.inner_rings if inner_ring.held)
    stops = sum(bool(tiles) for tiles in work.tiles)
    return (
        stops / ring.cp_size,
        near / max(1, tokens * ring.nodes * (ring.node_size - 1)),
        far / max(1, tokens * (ring.nodes - 1)),
    )


@lru_cache(maxsize=256)
def reach(mask: Mask, layout: Layout, cp_size: int, seq_len: int) -> int:
    """Local keys [0, reach) of every shard are all that any rank needs of it."""
    pairs = itertools.product(range(cp_size), repeat=2)
    tiles = itertools.chain.from_iterable(meeting(mask, layout, seq_len, cp_size, q, k) for q, k in pairs)
    return max((tile.k_stop for tile in tiles), default=0)
