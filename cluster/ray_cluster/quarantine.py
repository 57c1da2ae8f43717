"""Nodes that are used last and only after a passed check: by exact name, with a reason, kept beside the cluster.

By exact name, because a pattern such as `gpu1` would also match gpu10. A passed check, `burst cluster down` and `burst
cluster release` let a node in again; so does the expiry, because a list that is never cleared grows.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.files.errors import UsageError
from cluster.ray_cluster.state import write_private

QUARANTINE_FILE = "quarantine.json"
QUARANTINE_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Why a node is out, and until when (seconds since the epoch)."""

    reason: str
    until: float


class Quarantine:
    """The quarantine of a state directory. Reads the file each time: another program may have written it. Lanes, which
    run jobs at the same time, share one."""

    def __init__(self, folder: Path, seconds: float = QUARANTINE_SECONDS) -> None:
        self._path = folder / QUARANTINE_FILE
        self._seconds = seconds
        self._lock = threading.Lock()  # held from reading the file to writing it

    def entries(self, now: float | None = None) -> Mapping[str, Entry]:
        """Nodes that are out now. Raises UsageError for a file that cannot be understood."""
        now = time.time() if now is None else now
        return {name: entry for name, entry in self._read().items() if entry.until > now}

    def add(self, name: str, reason: str, now: float | None = None) -> None:
        """Take a node out; one that is out already stays so for longer."""
        now = time.time() if now is None else now
        with self._lock:
            self._write({**self.entries(now), name: Entry(reason=reason, until=now + self._seconds)})

    def release(self, *names: str) -> list[str]:
        """Let nodes in again; returns those that were out."""
        with self._lock:
            entries = self.entries()
            released = [name for name in names if name in entries]
            if released:
                self._write({other: entry for other, entry in entries.items() if other not in released})
        return released

    def _write(self, entries: Mapping[str, Entry]) -> None:
        plain = {name: asdict(entry) for name, entry in entries.items()}
        write_private(self._path, json.dumps(plain, indent=1) + "\n")

    def _read(self) -> dict[str, Entry]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            entries = {
                name: Entry(reason=str(entry["reason"]), until=float(entry["until"])) for name, entry in found.items()
            }
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UsageError(
                f"{self._path} cannot be read ({error.strerror}); give --state a folder of yours"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(self._no_quarantine()) from error
        if not all(math.isfinite(entry.until) for entry in entries.values()):
            raise UsageError(self._no_quarantine())
        return entries

    def _no_quarantine(self) -> str:
        return f"{self._path} does not hold a reason and a time for each node; remove it to let all nodes in again"
