"""Error counters of nodes from earlier checks: a counter that rises matters more than one that is not 0.

One file of JSON lines per node. Only counters and the verdict are kept, nothing about users or processes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cluster.checks import Check
from cluster.files.filesystem import state_folder, try_lock, write_whole
from cluster.health.nodes import NodeReport
from cluster.probing.verdict import Verdict, merge

MAX_LINES = 1000  # of one node's file; half of them go when it is full
_TAIL_BYTES = 256 * 1024  # where the last entry is looked for


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRecord:
    """One check of one node: counters by check, then by name."""

    time: str  # ISO 8601, UTC
    verdict: str
    counters: Mapping[str, Mapping[str, int]]


def default_folder() -> Path:
    """The default folder for counters."""
    return state_folder("nodes")


def entry_of(report: NodeReport, now: datetime | None = None) -> CheckRecord:
    """The part of a report that is kept."""
    counters = {}
    for name, verdict in report.verdicts.items():
        found = verdict.facts.get("counters")
        if isinstance(found, Mapping):
            counters[name] = {str(key): int(value) for key, value in found.items()}
    return CheckRecord(
        time=(now or datetime.now(UTC)).isoformat(timespec="seconds"), verdict=report.level, counters=counters
    )


def rises(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    """How much each counter has grown. One that is new, or smaller than before (a restart), has not."""
    return {name: value - before[name] for name, value in now.items() if name in before and value > before[name]}


def judge(before: CheckRecord | None, now: CheckRecord, checks: Mapping[str, Check]) -> Verdict:
    """A verdict on the growth since the last entry, by the `rise` of each check."""
    if before is None:
        return Verdict(level="ok", summary="first check of this node, so nothing to compare with")
    verdicts = []
    hours = _hours(before.time, now.time)
    for name, counters in now.counters.items():
        rise = checks[name].rise if name in checks else None
        grown = {
            counter: growth
            for counter, growth in rises(before.counters.get(name, {}), counters).items()
            if rise and rise.is_meant(counter, growth, hours)
        }
        if rise and grown:
            listed = ", ".join(f"{counter} by {growth}" for counter, growth in sorted(grown.items()))
            verdicts.append(
                Verdict(
                    level=rise.level,
                    summary=f"rose since {before.time}: {listed}; {rise.meaning}",
                    action=rise.action,
                    facts={name: grown},
                )
            )
    return merge(verdicts) if verdicts else Verdict(level="ok", summary=f"no counter rose since {before.time}")


def _hours(before: str, now: str) -> float:
    """Hours between two entries; 0 where a time cannot be read, or the clock was set back."""
    try:
        return max(0.0, (datetime.fromisoformat(now) - datetime.fromisoformat(before)).total_seconds() / 3600)
    except (ValueError, TypeError):  # the second where only one of them has a time zone
        return 0.0


class History:
    """The files of a folder. Raises OSError where the folder cannot be used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def last(self, node: str) -> CheckRecord | None:
        """The newest entry that can be read; a line cut short by a crash is left out."""
        try:
            with open(self._path(node), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _TAIL_BYTES))
                lines = file.read().splitlines()
        except FileNotFoundError:
            return None
        return next((entry for line in reversed(lines) if (entry := _parse(line))), None)

    def append(self, node: str, entry: CheckRecord) -> None:
        """Add one line in one write; the file is cut when it has grown too long. Safe beside other programs."""
        line = json.dumps({"time": entry.time, "verdict": entry.verdict, "counters": entry.counters}) + "\n"
        path = self._path(node)
        with self._locked():
            kept = path.read_bytes() if path.exists() else b""
            broken = kept and not kept.endswith(b"\n")  # by a crash or a full disk
            with open(path, "ab", buffering=0) as file:
                file.write((b"\n" if broken else b"") + line.encode())
            lines = kept.splitlines(keepends=True)
            if len(lines) >= MAX_LINES:
                write_whole(path, b"".join([*lines[-MAX_LINES // 2 :], line.encode()]), 0o600)

    def _path(self, node: str) -> Path:
        name = quote(node, safe="@+,=")
        return self._folder / f"{'%2E' + name[1:] if name.startswith('.') else name}.jsonl"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self._folder / ".lock", "wb") as lock:
            try_lock(lock, wait=True)  # without locks an entry is still one write; only cutting may lose another's
            yield


def _parse(line: bytes) -> CheckRecord | None:
    """One entry, or None for a line that is none."""
    try:
        found: Any = json.loads(line)
        counters = {
            str(check): {str(name): int(value) for name, value in values.items()}
            for check, values in found["counters"].items()
        }
        return CheckRecord(time=str(found["time"]), verdict=str(found["verdict"]), counters=counters)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
