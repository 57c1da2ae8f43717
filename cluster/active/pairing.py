"""Pairs of nodes for exchanges: rounds with every node in one pair, and a second pass that finds the broken node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

Pair = tuple[str, str]
MAX_ROUNDS = 15  # all pairs of 16 nodes; of more nodes, each exchanges with 15 others


def rounds(nodes: Sequence[str], most: int = MAX_ROUNDS) -> list[list[Pair]]:
    """Pairs that can run side by side, round by round: the circle method of tournaments.

    With up to `most` + 1 nodes every pair occurs exactly once.
    """
    circle: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    found = []
    for _ in range(min(most, len(circle) - 1)):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(one, other) for one, other in pairs if one is not None and other is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in found if pairs]


def suspects(worked: Mapping[Pair, bool]) -> list[str]:
    """Nodes that explain the failed exchanges, in the order they occur.

    A broken node fails with every other, a sound one only with broken ones: those with the most failures are suspected,
    their exchanges taken out, and so on until no failure is left. Equals are suspected together.
    """
    left = {pair for pair, good in worked.items() if not good}
    blamed: set[str] = set()
    while left:
        failures = Counter(node for pair in left for node in pair)
        most = max(failures.values())
        blamed |= {node for node, times in failures.items() if times == most}
        left = {pair for pair in left if not blamed & set(pair)}
    return [node for node in nodes_of(worked) if node in blamed]


def second_pass(worked: Mapping[Pair, bool]) -> list[list[Pair]]:
    """Rounds that pair every suspect with a node that is none: this separates two nodes that failed together.

    Empty when nothing failed, or when no node is beyond doubt.
    """
    doubted = suspects(worked)
    trusted = [node for node in nodes_of(worked) if node not in doubted]
    if not trusted:
        return []
    return [
        list(zip(doubted[at : at + len(trusted)], trusted, strict=False)) for at in range(0, len(doubted), len(trusted))
    ]


def culprits(worked: Mapping[Pair, bool], again: Mapping[Pair, bool]) -> dict[str, str]:
    """Suspects by the result of the second pass: `broken`, `cleared`, or `undecided` for a node without one."""
    verdict_by_good = {True: "cleared", False: "broken"}
    found = {pair[0]: verdict_by_good[good] for pair, good in again.items()}
    return {node: found.get(node, "undecided") for node in suspects(worked)}


def speeds_of(node: str, speeds: Mapping[Pair, float | None]) -> list[float]:
    """The measured speeds of a node's exchanges."""
    return [speed for pair, speed in speeds.items() if node in pair and speed is not None]


def nodes_of(pairs: Iterable[Pair]) -> list[str]:
    """Every node of these pairs once, in their order."""
    return list(dict.fromkeys(node for pair in pairs for node in pair))
