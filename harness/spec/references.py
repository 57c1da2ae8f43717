"""What an experiment may be put beside: `reference.paper` names an experiment of results/paper/experiments.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from cluster.files.reader import Node, convert, read_yaml
from harness.base.errors import UsageError, nearest

PAPER_DIR = Path(__file__).parents[2] / "results" / "paper"  # published numbers, beside the code


@cache
def paper_experiments() -> tuple[str, ...]:
    """Ids of the published experiments, in the order of their file."""
    root = read_yaml(PAPER_DIR / "experiments.yaml", "description of published experiments").mapping("the description")
    return tuple(convert(one.mapping("an experiment")["id"], str, "id") for one in root["experiments"].items())


def read_paper_reference(node: Node) -> str:
    """The published experiment that `node` names. Raises UsageError with file, line and the nearest name."""
    name: str = convert(node, str, "reference.paper")
    if name not in paper_experiments():
        raise UsageError(f"{node.place}: unknown reference {name}; {nearest(name, paper_experiments())}")
    return name
