"""What one rank does at every stop of a ring, and what travels for it: computed once per problem. Pure integer code."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from engine.attention.layout import Layout
from engine.attention.masks import Mask, meeting
from engine.attention.ring import Ring
from engine.attention.tiles import Tile


@dataclass(frozen=True, slots=True)
class Needs:
    """Which tokens of travelling shards are needed where, between the slots of one lap."""

    ranges: dict[tuple[int, int], tuple[int, int]]  # (owner, host) -> the owner's local tokens; (0, 0) for none
    one_part: dict[tuple[int, int], bool]  # the host computes the visiting gradient in one kernel call
    longest: int  # most tokens any slot is sent by another
    all_one_part: bool  # no visiting gradient between slots is a sum

    def visit(self, owner: int, host: int) -> tuple[int, int]:
        """Range of the owner's local tokens that the host's work touches: (0, 0) when it touches none."""
        return self.ranges[owner, host]


@dataclass(frozen=True, slots=True)
class Itinerary:
    """One rank's work: tiles against every owner's shard, and the needs of each lap."""

    tiles: tuple[tuple[Tile, ...], ...]  # by owner
    laps: tuple[Needs, ...]  # by cycle


@lru_cache(maxsize=256)
def itinerary(mask: Mask, layout: Layout, ring: Ring, seq_len: int, cp_rank: int, queries_travel: bool) -> Itinerary:
    """What `cp_rank` does when shards travel `ring`: the query side's or the key side's."""

    def tiles(visitor: int, host: int) -> tuple[Tile, ...]:
        q_rank, k_rank = (visitor, host) if queries_travel else (host, visitor)
        return meeting(mask, layout, seq_len, ring.cp_size, q_rank, k_rank)

    def needs(cycle: int) -> Needs:
        node = cp_rank // ring.node_size
        visitors, hosts = (node - cycle) % ring.nodes * ring.node_size, node * ring.node_size
        ranges, one_part = {}, {}
        for owner, host in itertools.product(range(ring.node_size), repeat=2):
            met = tiles(visitors + owner, hosts + host)
            sides = [tile.q if queries_travel else tile.k for tile in met]
            ranges[owner, host] = (min(s.start for s in sides), max(s.stop for s in sides)) if sides else (0, 0)
            one_part[owner, host] = len(met) == 1
        between = [pair for pair in ranges if pair[0] != pair[1]]
        return Needs(
            ranges,
            one_part,
            longest=max((ranges[pair][1] - ranges[pair][0] for pair in between), default=0),
            all_one_part=all(one_part[pair] for pair in between if ranges[pair] != (0, 0)),
        )

    return Itinerary(
        tiles=tuple(tiles(owner, cp_rank) for owner in range(ring.cp_size)),
        laps=tuple(needs(cycle) for cycle in range(ring.nodes)),
    )


@lru_cache(maxsize=256)
def reach(mask: Mask, layout: Layout, cp_size: int, seq_len: int) -> int:
    """Local keys [0, reach) of every shard are all that any rank needs of it."""
    pairs = itertools.product(range(cp_size), repeat=2)
    tiles = itertools.chain.from_iterable(meeting(mask, layout, seq_len, cp_size, q, k) for q, k in pairs)
    return max((tile.k_stop for tile in tiles), default=0)
