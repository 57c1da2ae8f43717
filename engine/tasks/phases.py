"""Seconds of a trial outside its measured steps, one line of the log per phase."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Phases:
    """Seconds of each phase and since the start, printed where `shown`."""

    def __init__(self, *, shown: bool, seconds: float = 0.0) -> None:
        """`seconds` have passed already, in the first phase."""
        self._shown = shown
        self._started = self._last = time.monotonic() - seconds

    def end(self, phase: str) -> None:
        """Print how long the phase that ends here took; the next one begins."""
        now = time.monotonic()
        if self._shown:
            print(f"{now - self._started:8.2f} s: {phase} took {now - self._last:.2f} s", flush=True)
        self._last = now


def process_seconds() -> float:
    """Seconds since this process was started, or forked: as exact as the kernel's clock tick, 10 ms."""
    # The name in field 2 may hold spaces and brackets; the start, in ticks since the boot, is field 22.
    ticks = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
