"""Section `search` of an experiment: how far its sequence lengths are run, and between which of them is searched.

No part of a trial's settings or its id, as the number of rounds is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cluster.files.reader import Node, build
from harness.base.lengths import with_lengths

Until = Literal["no", "oom", "failure"]
LENGTH_KEYS = frozenset({"bisect", "at_most"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """How a run adapts its sequence lengths, for each combination of the other settings alone.

    After the first length that ends as `until` says (`oom`: memory of a GPU or of the host ran out; `failure`: also
    failed, timeout or hang), longer ones do not run. Then the longest that trains is found to within `bisect` tokens.
    """

    until: Until = "no"
    bisect: int = 0  # tokens, of which searched lengths are multiples; 0: no further lengths
    at_most: int = 0  # tokens; lengths are doubled up to it while all train; 0: none beyond those of the sweep

    def __post_init__(self) -> None:
        if self.bisect < 0 or self.at_most < 0:
            raise ValueError("search.bisect and search.at_most are numbers of tokens; expected at least 0")
        if self.until == "no" and (self.bisect or self.at_most):
            raise ValueError("search.bisect and search.at_most need search.until; add until: oom")
        if self.at_most and not self.bisect:
            raise ValueError("search.at_most needs search.bisect; add the precision in tokens, such as bisect: 16k")

    def __str__(self) -> str:
        """In words, for a reader of a plan."""
        ends = "memory runs out" if self.until == "oom" else "a trial fails or memory runs out"
        found = f", then the longest that trains to within {self.bisect} tokens" if self.bisect else ""
        return f"lengths ascend until {ends}{found}"


def read_search(node: Node | None) -> Search:
    """The section; without one nothing is searched. Raises UsageError."""
    return Search() if node is None else build(Search, with_lengths(node, LENGTH_KEYS, "search"), "search")
