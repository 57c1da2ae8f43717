"""Nodes that are used last and only after a passed check: by exact name, with a reason, kept beside the cluster.

By exact name, because a pattern such as `gpu1` would also match gpu10. A passed check, `burst cluster down` and `burst
cluster release` let a node in again; so does the expiry, because a list that is never cleared grows.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.files.errors import UsageError
from cluster.files.filesystem import try_lock
from cluster.ray_cluster.state import write_private

QUARANTINE_FILE = "quarantine.json"
QUARANTINE_SECONDS = 900.0
LOCK_FILE = ".quarantine.lock"  # held for milliseconds; that of the state directory is held while a cluster starts


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Why a node is out, and until when (seconds since the epoch)."""

    reason: str
    until: float


class Quarantine:
    """The quarantine of a state directory. Reads the file each time: another program may have written it, such as
    `burst check` beside a run. Lanes, which run jobs at the same time, share one."""

    def __init__(self, folder: Path, seconds: float = QUARANTINE_SECONDS) -> None:
        self._path = folder / QUARANTINE_FILE
        self._seconds = seconds
        self._lock = threading.Lock()  # of the lanes; `_alone` also keeps other programs out

    def entries(self, now: float | None = None) -> Mapping[str, Entry]:
        """Nodes that are out now. Raises UsageError for a file that cannot be understood."""
        now = time.time() if now is None else now
        return {name: entry for name, entry in self._read().items() if entry.until > now}

    def add(self, name: str, reason: str, now: float | None = None) -> None:
        """Take a node out; one that is out already stays so for longer."""
        now = time.time() if now is None else now
        with self._alone():
            self._write({**self.entries(now), name: Entry(reason=reason, until=now + self._seconds)})

    def release(self, *names: str) -> list[str]:
        """Let nodes in again; returns those that were out."""
        if not self.entries().keys() & set(names):  # the usual case, in which the folder may not even exist
            return []
        with self._alone():
            entries = self.entries()
            released = [name for name in names if name in entries]
            if released:
                self._write({other: entry for other, entry in entries.items() if other not in released})
        return released

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """From reading the file to writing it: no other lane or program writes meanwhile."""
        with self._lock, contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):  # no folder that can be written, as `_write` says
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = os.open(self._path.with_name(LOCK_FILE), os.O_RDWR | os.O_CREAT, 0o600)
                held.callback(os.close, lock)
                try_lock(lock, wait=True)
            yield

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
