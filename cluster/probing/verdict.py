"""The result of a check: its level, one sentence, the action to take, and the facts it read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Level = Literal["ok", "warn", "fail", "unknown"]
Action = Literal["none", "monitor", "reset", "reboot", "isolate"]

# From harmless to serious. `fail` is above `unknown`, as in the Nagios plugin guidelines; `unknown` is above `warn`,
# because a node that could not be checked must not be used.
LEVELS: tuple[Level, ...] = ("ok", "warn", "unknown", "fail")
ACTIONS: tuple[Action, ...] = ("none", "monitor", "reset", "reboot", "isolate")
EXIT_CODES: dict[Level, int] = {"ok": 0, "warn": 1, "fail": 2, "unknown": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of one check on one node."""

    level: Level
    summary: str  # one sentence: the finding and, unless ok, the expectation
    action: Action = "none"
    busy: bool = False  # other processes use the node: healthy perhaps, but not free
    facts: Mapping[str, object] = field(default_factory=dict)  # JSON values, for machines and for comparing nodes


def ok(summary: str, *, facts: Mapping[str, object] | None = None) -> Verdict:
    """Nothing to do."""
    return Verdict(level="ok", summary=summary, facts=facts or {})


def warn(summary: str, action: Action = "monitor", *, facts: Mapping[str, object] | None = None) -> Verdict:
    """The node can be used, and somebody should look at it."""
    return Verdict(level="warn", summary=summary, action=action, facts=facts or {})


def fail(summary: str, action: Action = "isolate", *, facts: Mapping[str, object] | None = None) -> Verdict:
    """The node must not be used before `action`."""
    return Verdict(level="fail", summary=summary, action=action, facts=facts or {})


def unknown(summary: str, action: Action = "none", *, facts: Mapping[str, object] | None = None) -> Verdict:
    """Nothing was found out, so the node must not be used."""
    return Verdict(level="unknown", summary=summary, action=action, facts=facts or {})


def worst_level(levels: Iterable[Level]) -> Level:
    """The most serious of them; ok when there is none."""
    return max(levels, key=LEVELS.index, default="ok")


def strongest_action(actions: Iterable[Action]) -> Action:
    """The most drastic of them; none when there is none."""
    return max(actions, key=ACTIONS.index, default="none")


def with_facts(verdict: Verdict, **facts: object) -> Verdict:
    """The same verdict with these facts beside its own."""
    return replace(verdict, facts={**verdict.facts, **facts})


def merge(verdicts: Iterable[Verdict]) -> Verdict:
    """One verdict from several: the worst level, and every sentence of that level.

    Facts with the same name are replaced by the later ones.
    """
    parts = list(verdicts)
    level = worst_level(part.level for part in parts)
    return Verdict(
        level=level,
        summary="; ".join(part.summary for part in parts if part.level == level),
        action=strongest_action(part.action for part in parts),
        busy=any(part.busy for part in parts),
        facts={name: value for part in parts for name, value in part.facts.items()},
    )
