"""Ctrl-C once ends a run in order; pressed again meanwhile it gets a sentence, and breaks nothing off."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_SECONDS = 60.0  # for the ranks, Ray and the report to end; a signal after it breaks off what hangs

_SENTENCE = (
    "burst: the run is being ended and its records are kept; "
    f"what still hangs after {PATIENCE_SECONDS:g} s is broken off by another Ctrl-C\n"
)


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """A block that the first signal interrupts, as Ctrl-C does; those of the next PATIENCE_SECONDS only say so.

    After a signal the handlers outlive the block: at the program's own end Ray takes a moment, and would show where it
    was interrupted. Signals that the program was started to ignore stay ignored. For the main thread alone.
    """
    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not signal.SIG_IGN}
    began: float | None = None  # of the interruption under way

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal began
        if began is None or time.monotonic() - began >= PATIENCE_SECONDS:
            began = time.monotonic()
            raise KeyboardInterrupt
        if sys.__stderr__ is not None:
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(sys.__stderr__.fileno(), _SENTENCE.encode())  # a print may be what was interrupted

    def ignore() -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    atexit.register(ignore)  # before Ray registers its end, hence after it: the exit code is settled then
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        if began is None:
            atexit.unregister(ignore)
            for number, handler in before.items():
                signal.signal(number, handler)
