"""Communication plans formed pair by pair from the masks' tiles, as the definitions read: the oracle of the fast
ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from engine.attention.accumulate.accumulators import WAITING_PARTS
from engine.attention.geometry.layout import Layout, Ring
from engine.attention.masks import Mask
from tests.positions import rank_pair_tiles


@dataclass(frozen=True)
class SlowRanges:
    """Fields of `ChunkRanges`."""

    used: dict[tuple[int, int], tuple[int, int]]
    unreduced: dict[tuple[int, int], bool]
    longest: int
    all_unreduced: bool
    held: tuple[tuple[int, int], ...] | None


def slow_plan(
    mask: Mask, layout: Layout, ring: Ring, seq_len: int, cp_rank: int, sends_queries: bool
) -> dict[str, Any]:
    """The fields of `comm_plan`'s result."""
    node, local_rank = divmod(cp_rank, ring.node_size)

    def tiles(owner: int, worker: int):
        q_rank, k_rank = (owner, worker) if sends_queries else (worker, owner)
        return rank_pair_tiles(mask, layout, seq_len, ring.cp_size, q_rank, k_rank)

    def sides(owner: int, worker: int) -> list[tuple[int, int]]:
        slices = [tile.q if sends_queries else tile.k for tile in tiles(owner, worker)]
        return [(each.start, each.stop) for each in slices]

    def used_in_node(owner: int, outer_step: int) -> list[tuple[int, int]]:
        first = (owner // ring.node_size + outer_step) % ring.nodes * ring.node_size
        return [side for worker in range(first, first + ring.node_size) for side in sides(owner, worker)]

    def unreduced_across(owner: int, outer_step: int) -> bool:
        return ring.node_size == 1 and disjoint(used_in_node(owner, outer_step))

    def needed(owner: int, outer_step: int) -> tuple[int, int]:
        return hull([hull(used_in_node(owner, later)) for later in range(outer_step, ring.nodes)])

    def owner_at(outer_step: int, at: int = local_rank) -> int:
        return (node - outer_step) % ring.nodes * ring.node_size + at

    def chunk_ranges(outer_step: int) -> SlowRanges:
        owners, workers = owner_at(outer_step, 0), node * ring.node_size
        pairs = list(itertools.product(range(ring.node_size), repeat=2))
        all_sides = {(owner, worker): sides(owners + owner, workers + worker) for owner, worker in pairs}
        used = {pair: hull(found) for pair, found in all_sides.items()}
        unreduced = {pair: disjoint(found) for pair, found in all_sides.items()}
        between = [(owner, worker) for owner, worker in pairs if owner != worker]
        held = tuple(needed(owner_at(outer_step, at), outer_step) for at in range(ring.node_size))
        return SlowRanges(
            used,
            unreduced,
            max((used[pair][1] - used[pair][0] for pair in between), default=0),
            all(unreduced[pair] for pair in between),
            held if outer_step else None,
        )

    steps = []
    for index in range(ring.cp_size):
        owner = ring.owner(cp_rank, index)
        steps.append((owner, *divmod(index, ring.node_size), [(t.q, t.k, t.band) for t in tiles(owner, cp_rank)]))
    outer_steps = range(ring.nodes)
    return {
        "steps": steps,
        "inner_rings": [chunk_ranges(outer_step) for outer_step in outer_steps],
        "leaving": [needed(owner_at(outer_step), outer_step + 1) for outer_step in outer_steps[:-1]],
        "given": [hull(used_in_node(owner_at(outer_step), outer_step)) for outer_step in outer_steps],
        "given_unreduced": [unreduced_across(owner_at(outer_step), outer_step) for outer_step in outer_steps],
        "returned": [hull(used_in_node(cp_rank, outer_step)) for outer_step in outer_steps],
        "returned_unreduced": [unreduced_across(cp_rank, outer_step) for outer_step in outer_steps],
    }


def hull(ranges: list[tuple[int, int]]) -> tuple[int, int]:
    filled = [(start, stop) for start, stop in ranges if stop > start]
    return (min(start for start, _ in filled), max(stop for _, stop in filled)) if filled else (0, 0)


def disjoint(ranges: list[tuple[int, int]]) -> bool:
    ordered = sorted(ranges)
    apart = all(before[1] <= after[0] for before, after in itertools.pairwise(ordered))
    return apart and len(ranges) <= WAITING_PARTS
