"""Do the nodes run the same software? Ray refuses another Python patch version late; we say so at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


def mismatch(versions: Mapping[str, Mapping[str, str]]) -> str:
    """One sentence naming what differs and on which nodes, empty when all agree.

    `versions` is by node and then by what: python, ray, torch, code. The value most nodes have is taken for the right
    one; on a tie the first node's.
    """
    parts = []
    for what in dict.fromkeys(what for found in versions.values() for what in found):
        by_node = {node: found.get(what, "not known") for node, found in versions.items()}
        [(usual, count)] = Counter(by_node.values()).most_common(1)
        if count < len(by_node):
            others = ", ".join(f"{value} on {node}" for node, value in by_node.items() if value != usual)
            parts.append(f"{what} is {usual} on {count} of {len(by_node)} nodes but {others}")
    return "; ".join(parts) + "; install the same everywhere, or leave those nodes out" if parts else ""


def absent(versions: Mapping[str, str]) -> list[str]:
    """What a node lacks of the packages it was asked for."""
    return [what for what, version in versions.items() if version == "not installed"]
