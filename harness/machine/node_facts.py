"""What a cluster's launcher must know of a node: `python -m harness.machine.node_facts`, run there, prints it as JSON.

`versions.code` digests the project's files, so that nodes with another commit, or with edits, are told apart also where
the checkout is a copy without its history.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from cluster.inventory.nodes import Node
from harness.machine.this_machine import Machine, discover
from harness.records.provenance import PROJECT_ROOT, commit

PACKAGES = ("harness", "engine", "baselines", "cluster", "experiments")
_SUFFIXES = (".py", ".yaml", ".j2")
_DIGITS = 12


def main() -> None:
    machine = dataclasses.asdict(discover())
    print(json.dumps({"versions": {"code": code_digest(PROJECT_ROOT)}, "commit": commit(), "machine": machine}))


def code_digest(root: Path) -> str:
    """Of names and contents of all code and data that a trial may read; the same for equal trees wherever they are."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in _SUFFIXES and "upstream" not in path.parts:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
                digest.update(f"{path.relative_to(root)} {content}\n".encode())
    return digest.hexdigest()[:_DIGITS]


def machine_of(description: dict[str, Any]) -> Machine:
    """The machine that a node described."""
    return Machine(**description["machine"])


def ranks_of(node: Node, description: dict[str, Any]) -> int:
    """Ranks of one trial that a node takes: what its site says, else one per GPU. Raises ValueError without either."""
    machine = machine_of(description)
    if machine.gpu_problem:
        raise ValueError(machine.gpu_problem)
    ranks = node.site.ranks_per_node or machine.gpu_count
    if not ranks:
        raise ValueError("it has no GPU, so the site must say how many ranks it takes; set ranks_per_node")
    if 0 < machine.gpu_count < ranks:
        raise ValueError(f"ranks_per_node is {ranks}, but it has {machine.gpu_count} GPUs; give at most that many")
    return ranks


if __name__ == "__main__":
    main()
