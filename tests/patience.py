"""How long tests wait. They wait for events; a number of seconds only ends a test that would wait for ever.

A deadline that is itself the subject of a test is waited out, so it is short, and longer where the machine is slower
at that moment: it is measured how much.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

from tests.processes import stat_of

AMPLE = 600.0  # seconds; a deadline that is not the subject of its test, and that no machine reaches
SOON = 60.0  # seconds in which an idle machine does whatever a test waits for

# Starts an interpreter, reads modules and computes: about as much of each as a rank or a command at its start.
_WORK = "import asyncio, hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 500_000)"
_IDLE_SECONDS = 0.3  # of that work, on an idle core of a machine of 2023
_FRESH_SECONDS = 10.0  # a measurement so recent is still true

_measured: tuple[float, float] | None = None  # when, and how slow


def slowness() -> float:
    """How many times longer a small program takes at this moment than on an idle machine; at least 1."""
    global _measured
    if _measured is None or time.monotonic() - _measured[0] > _FRESH_SECONDS:
        started = time.monotonic()
        subprocess.run([sys.executable, "-I", "-c", _WORK], check=True)
        ended = time.monotonic()
        _measured = ended, max(1.0, (ended - started) / _IDLE_SECONDS)
    return _measured[1]


def scaled(seconds: float) -> float:
    """A deadline that allows on this machine, at this moment, as much work as `seconds` allow on an idle one."""
    factor = slowness()
    return seconds if factor == 1 else float(math.ceil(seconds * factor))


def wait_until(condition: Callable[[], object], complaint: str | Callable[[], str], seconds: float = SOON) -> None:
    """Wait for `condition` to be true. Fails with `complaint` after `seconds` of an idle machine, scaled. A complaint
    that is a function is called only then, so it can tell what there is at that moment."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        if waited > seconds and waited > scaled(seconds):
            said = complaint if isinstance(complaint, str) else complaint()
            raise AssertionError(f"{said}, after {waited:.0f} s")
        time.sleep(0.02)


def running(pid: int) -> bool:
    """Whether a process runs. Zombies of a dead parent count as ended: in a container nothing may reap them."""
    return stat_of(pid)[:1] not in ([], ["Z"], ["X"])


def wait_for_end(pids: Iterable[int]) -> None:
    """Wait until none of the processes runs."""
    left = list(pids)
    wait_until(lambda: not any(map(running, left)), f"of the processes {left} some still run")
