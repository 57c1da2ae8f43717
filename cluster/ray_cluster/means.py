"""What starting or looking at a cluster needs of its caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.inventory.nodes import Node
from cluster.transport.runner import Connect


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """How nodes are reached and judged, and what the caller wants to know of each."""

    connect: Connect
    unfit: Callable[[Sequence[Node]], dict[str, str]]  # why not, by name of the node
    # Arguments for the node's Python, run in its checkout: prints one JSON object, of which `versions` (text by name)
    # must be equal on all nodes. Everything it prints is kept in the state.
    describe: Sequence[str]
    ranks: Callable[[Node, dict[str, Any]], int]  # how many fit on a node, by what it said of itself; raises ValueError
    folder: Path  # our own checkout: where a site names none, the nodes have it at the same path
    say: Callable[[str], None]
    known_hosts: Path | None = None
    seconds: float = 60.0  # for one answer of one node
