"""Health checks, one file each: a probe that runs on the node and a pure judgement of its output.

Every module of the folders here, one per subject, defines one `CHECK`; its file name is the check's name. Checks with
the same probe share its run.
Imports `probing`, `profiles`, `inventory` and `files`: a check neither opens a connection nor imports another check.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from cluster.files.errors import UsageError, nearest
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Action, Level, Verdict
from cluster.profiles import NO_GPUS, Board


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """The meaning of a counter that has grown since the node's last check."""

    level: Level
    action: Action
    meaning: str  # ends the sentence "link_downed of mlx5_0:1 rose by 2 since ...: "
    least: int = 1  # growth below this is normal
    least_of: Mapping[str, int] = field(default_factory=dict)  # the same for counters whose name ends with this word
    per_hour: Mapping[str, int] = field(default_factory=dict)  # by that word: growth below this in an hour is normal

    def is_meant(self, counter: str, growth: int, hours: float) -> bool:
        """True when a counter that has grown by this much within `hours` matters."""
        word = counter.rpartition(" ")[2]
        return growth >= self.least_of.get(word, self.least) and growth >= self.per_hour.get(word, 0) * max(1.0, hours)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A probe of a node and its judgement. `judge` sees only outputs of probes that ended by themselves, and is pure.

    Counters that a judge puts into the fact `counters` (a mapping of names to whole numbers) are kept from run to run.
    """

    source: str  # the document or project that the check or its thresholds are from
    probe: Callable[[Site], Probe]
    judge: Callable[[Output, Site], Verdict]
    rise: Rise | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BoardCheck:
    """A check whose thresholds, or whose whole point, depend on the GPUs of the node."""

    source: str
    probe: Callable[[Site], Probe]
    judge: Callable[[Output, Site, Board], Verdict]
    rise: Rise | None = None


AnyCheck = Check | BoardCheck


def discover() -> dict[str, AnyCheck]:
    """Every check by name, in alphabetical order."""
    checks: dict[str, AnyCheck] = {}
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        if not module.ispkg:
            name = module.name.rpartition(".")[2]
            check = importlib.import_module(module.name).CHECK
            assert isinstance(check, Check | BoardCheck), module.name
            assert name not in checks, f"two checks are named {name}"
            checks[name] = check
    return dict(sorted(checks.items()))


def select(only: Collection[str], skip: Collection[str]) -> dict[str, AnyCheck]:
    """The checks named by `only` (empty: all of them) without those in `skip`. Raises UsageError for unknown names."""
    checks = discover()
    for name in (*only, *skip):
        if name not in checks:
            raise UsageError(f"there is no check {name!r}; {nearest(name, checks)}")
    chosen = {name: check for name, check in checks.items() if (not only or name in only) and name not in skip}
    if not chosen:
        raise UsageError("--only and --skip leave no check; name at least one")
    return chosen


def conclude(
    check: AnyCheck, probe: Probe, output: Output | None, complaint: str, site: Site, board: Board = NO_GPUS
) -> Verdict:
    """The verdict on a probe however it went: judged when it ended, unknown when it hung or left nothing.

    `complaint` is the message of a node's shell that did not run the probes, or "".
    """
    if output is None:
        return Verdict(level="unknown", summary=f"the probe did not run ({complaint or 'no output'})")
    if output.timed_out:
        return Verdict(
            level="unknown",
            summary=f"the probe did not end within {probe.seconds:g} s; look for a hanging device or mount",
            action="monitor",
        )
    return check.judge(output, site, board) if isinstance(check, BoardCheck) else check.judge(output, site)
