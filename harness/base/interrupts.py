"""Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal: one flag, which the loops of a command look at.

Outside of a `deferred` block a signal also raises KeyboardInterrupt at once, as Ctrl-C does in any Python program.
Within one, while trials run and files are written, it only sets the flag: the loops that wait `look`, and end in order.
Python drops an exception that a destructor or an import raises; the flag stays, and the next `look` raises it again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

# SIGUSR1 is what Slurm sends ahead of a job's time limit, by --signal=USR1@60.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PATIENCE_SECONDS = 60.0  # for the ranks and the report to end; a signal after it breaks off what hangs

_SENTENCE = (
    "burst: the run is being ended and its records are kept; "
    f"what still hangs after {PATIENCE_SECONDS:g} s is broken off by another Ctrl-C\n"
)


class _Block:
    """The handlers and the flag of one `interruptible` block."""

    def __init__(self, react: Callable[[int], bool]) -> None:
        self.requests = 0  # signals that are to interrupt the block
        self.deferrals = 0  # `deferred` blocks under way
        self._react = react
        self._before = {
            number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not signal.SIG_IGN
        }

    def begin(self) -> None:
        for number in self._before:
            signal.signal(number, self._heard)

    def end(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _heard(self, number: int, _: FrameType | None) -> None:
        if not self._react(number):
            return
        self.requests += 1  # one that came within the handler of another counts too
        if self.requests > 1 or self.deferrals == 0:
            raise KeyboardInterrupt


_current: _Block | None = None


@contextlib.contextmanager
def interruptible(react: Callable[[int], bool] = lambda _: True, *, outlives: bool = False) -> Iterator[None]:
    """A block that signals interrupt, as Ctrl-C does. `react` is called with each signal; False ignores that one.

    `outlives`: after a signal the handlers stay for the rest of the program. Signals that the program was started to
    ignore stay ignored. For the main thread alone.
    """
    global _current
    outer, block = _current, _Block(react)
    if outlives:
        atexit.register(block.ignore)  # before Ray registers its end, hence after it: the exit code is settled then
    _current = block
    block.begin()
    try:
        yield
    finally:
        if _current is block and not (outlives and block.requests):
            atexit.unregister(block.ignore)
            block.end()
            _current = outer


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """A block that the first signal interrupts; those of the next PATIENCE_SECONDS only print a sentence.

    After a signal the handlers outlive the block: at the program's own end Ray takes a moment, and would show where it
    was interrupted.
    """
    began: float | None = None  # of the interruption under way

    def react(_: int) -> bool:
        nonlocal began
        if began is None or time.monotonic() - began >= PATIENCE_SECONDS:
            began = time.monotonic()
            return True
        if sys.__stderr__ is not None:
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(sys.__stderr__.fileno(), _SENTENCE.encode())  # a print may be what was interrupted
        return False

    with interruptible(react, outlives=True):
        yield


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """A block in which the first signal only sets the flag, for loops that `look`; a second one raises at once."""
    block = _current
    if block is None:
        yield
        return
    block.deferrals += 1
    try:
        yield
    finally:
        block.deferrals -= 1


def end_requested() -> bool:
    """Whether a signal is to end the command. From any thread."""
    return _current is not None and _current.requests > 0


def end_at_once() -> bool:
    """Whether a second signal is to end the command, for which nothing more is waited."""
    return _current is not None and _current.requests > 1


def look() -> None:
    """Raise KeyboardInterrupt when `end_requested`. For loops that wait, of the main thread: it cancels what others
    do."""
    if end_requested() and threading.current_thread() is threading.main_thread():
        raise KeyboardInterrupt
