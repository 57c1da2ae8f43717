"""Health checks, one file each: a probe that runs on the node and a pure judgement of what it printed.

A module here that defines `CHECK` is a check; its file name is the check's name. Nothing else lists them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from cluster.probe import Output, Probe
from cluster.site import Site
from cluster.verdict import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A question to a node. `judge` sees only outputs of probes that ended by themselves, and is pure."""

    source: str  # who taught us the check or its thresholds
    probe: Callable[[Site], Probe]
    judge: Callable[[Output, Site], Verdict]


def discover() -> dict[str, Check]:
    """Every check by name, in alphabetical order."""
    checks: dict[str, Check] = {}
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        check = importlib.import_module(f"{__name__}.{module.name}").CHECK
        assert isinstance(check, Check), module.name
        checks[module.name] = check
    return checks


def conclude(check: Check, probe: Probe, output: Output | None, complaint: str, site: Site) -> Verdict:
    """The verdict on a probe however it went: judged when it ended, unknown when it hung or left nothing.

    `complaint` is what the node's shell said instead of running the probes, or "".
    """
    if output is None:
        return Verdict(level="unknown", summary=f"the probe did not run ({complaint or 'no output'})")
    if output.timed_out:
        return Verdict(
            level="unknown",
            summary=f"the probe did not end within {probe.seconds:g} s; look for a hanging device or mount",
            action="monitor",
        )
    return check.judge(output, site)
