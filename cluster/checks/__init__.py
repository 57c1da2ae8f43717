"""Health checks, one file a subject: each is a probe that runs on the node and a pure judgement of its output.

`@check` over a judge makes it the check of its name. Checks with the same probe share its run; thresholds stand in
`profiles`, and what a site expects in `inventory`.
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
from cluster.probing.verdict import Action, Level, Verdict, unknown
from cluster.profiles import Board

Judge = Callable[[Output, Site, Board], Verdict]


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
    """A probe of a node and its judgement, which sees only outputs of probes that ended by themselves, and is pure.

    Counters that a judge puts into the fact `counters` (a mapping of names to whole numbers) are kept from run to run.
    """

    name: str
    source: str  # the document or project that the check or its thresholds are from
    probe: Callable[[Site], Probe]
    judgement: Judge
    unreadable: str = ""  # of a probe that prints `end` last: what could not be read where that line is missing
    rise: Rise | None = None

    def judge(self, output: Output, site: Site, board: Board | None = None) -> Verdict:
        """The verdict on this output; `board` None: a node without GPUs, with the thresholds of this project."""
        if self.unreadable and "end" not in output.lines:
            return unknown(f"{self.unreadable} ({output.first_line})")
        return self.judgement(output, site, board or Board())


def check(
    probe: Probe | Callable[[Site], Probe], source: str, *, unreadable: str = "", rise: Rise | None = None
) -> Callable[[Judge], Check]:
    """Makes the judge below it the check of its name."""
    always = (lambda site: probe) if isinstance(probe, Probe) else probe

    def made(judge: Judge) -> Check:
        name = judge.__name__
        return Check(name=name, source=source, probe=always, judgement=judge, unreadable=unreadable, rise=rise)

    return made


def discover() -> dict[str, Check]:
    """Every check by name, in alphabetical order."""
    checks: dict[str, Check] = {}
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        for found in vars(importlib.import_module(module.name)).values():
            if isinstance(found, Check):
                assert found.name not in checks, f"two checks are named {found.name}"
                checks[found.name] = found
    return dict(sorted(checks.items()))


def select(only: Collection[str], skip: Collection[str], others: Collection[str] = ()) -> dict[str, Check]:
    """The checks named by `only` (empty: all of them) without those in `skip`; `others` are names of verdicts that no
    check here gives. Raises UsageError for unknown names, and where nothing is left."""
    checks = discover()
    known = [*checks, *others]
    for name in (*only, *skip):
        if name not in known:
            raise UsageError(f"there is no check {name!r}; {nearest(name, known)}")
    if not {name for name in known if (not only or name in only) and name not in skip}:
        raise UsageError("--only and --skip leave no check; name at least one")
    return {name: check for name, check in checks.items() if (not only or name in only) and name not in skip}


def conclude(check: Check, probe: Probe, output: Output | None, complaint: str, site: Site, board: Board) -> Verdict:
    """The verdict on a probe however it went: judged when it ended, unknown when it hung or left nothing.

    `complaint` is the message of a node's shell that did not run the probes, or "".
    """
    if output is None:
        return unknown(f"the probe did not run ({complaint or 'no output'})")
    if output.timed_out:
        summary = f"the probe did not end within {probe.seconds:g} s; look for a hanging device or mount"
        return unknown(summary, "monitor")
    return check.judge(output, site, board)
