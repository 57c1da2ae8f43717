"""Which hosts a job gets: the healthy and free ones of a cluster, checked just before, the unhealthy ones set aside."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cluster.inventory.nodes import Node
from cluster.ray_cluster.quarantine import Quarantine

FRESH_SECONDS = 30.0  # a node found healthy so recently is not asked again


class TooFewHosts(Exception):
    """A job that cannot be placed now; one sentence says what is wrong with every host that was not taken."""


class HostPool:
    """The hosts of one run, in the order ranks are placed on them."""

    def __init__(
        self,
        nodes: Sequence[Node],
        quarantine: Quarantine,
        unfit: Callable[[Sequence[Node]], dict[str, str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`unfit` checks nodes and says, by name, why some must not be used."""
        self._nodes = tuple(nodes)
        self._quarantine = quarantine
        self._unfit = unfit
        self._clock = clock
        self._healthy_at: dict[str, float] = {}
        self._gone: dict[str, str] = {}  # by name: why it is out for the rest of the run

    def take(self, count: int) -> list[Node]:
        """The first `count` hosts that are healthy now. Raises TooFewHosts."""
        while True:
            quarantined = self._quarantine.entries()
            usable = [node for node in self._nodes if node.name not in self._gone and node.name not in quarantined]
            chosen = usable[:count]
            if len(chosen) < count:
                raise TooFewHosts(self._too_few(count, {name: entry.reason for name, entry in quarantined.items()}))
            stale = [node for node in chosen if not self._is_fresh(node)]
            problems = self._unfit(stale) if stale else {}
            for node in stale:
                if node.name in problems:
                    self._quarantine.add(node.name, problems[node.name])
                else:
                    self._healthy_at[node.name] = self._clock()
            if not problems:
                return chosen

    def lose(self, name: str, reason: str) -> None:
        """A host that broke off in the middle of a job: out for this run, and in quarantine for others."""
        self._gone[name] = reason
        self._quarantine.add(name, reason)

    def without(self, name: str, reason: str) -> None:
        """A host this run cannot have, through no fault of its own."""
        self._gone[name] = reason

    def _is_fresh(self, node: Node) -> bool:
        since = self._clock() - self._healthy_at.get(node.name, float("-inf"))
        return since < FRESH_SECONDS

    def _too_few(self, count: int, quarantined: dict[str, str]) -> str:
        out = {node.name: self._gone.get(node.name) or quarantined.get(node.name) for node in self._nodes}
        reasons = "; ".join(f"{name}: {reason}" for name, reason in out.items() if reason)
        left = sum(reason is None for reason in out.values())
        return (
            f"{count} hosts are needed but {left} of {len(self._nodes)} can be used ({reasons}); "
            "repair them or wait for the end of their quarantine, then --resume --retry-failed"
        )
