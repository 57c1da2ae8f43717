"""Ctrl-C, SIGTERM, SIGUSR1 and a closed terminal interrupt a command in order, and none of them is lost.

A signal raises KeyboardInterrupt in the main thread. Python drops an exception that a destructor raises, and a library
may catch one that its imports raise. A signal that arrives in either waits until that is over. One that was dropped all
the same is raised again: a moment later where Python reports it, else at the command's next `look`.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

# SIGUSR1 is what Slurm sends ahead of a job's time limit, by --signal=USR1@60.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PATIENCE_SECONDS = 60.0  # for the ranks, Ray and the report to end; a signal after it breaks off what hangs
AGAIN_SECONDS = 0.05  # between attempts to raise a signal that waits
WAIT_SECONDS = 10.0  # for an import, a destructor or a held block to end; a signal then breaks it off
SETTLING_SECONDS = 0.5  # between two exceptions: while the first one unwinds, a second one would replace it

_SENTENCE = (
    "burst: the run is being ended and its records are kept; "
    f"what still hangs after {PATIENCE_SECONDS:g} s is broken off by another Ctrl-C\n"
)


class _Handlers:
    """The handlers of one `interruptible` block, and the state of its signals."""

    def __init__(self, react: Callable[[int], bool]) -> None:
        self.requested = False  # a signal was to interrupt the block
        self.holds = 0  # `held` blocks under way, less the `released` ones in them
        self._react = react
        self._arrived: list[int] = []  # signals that nothing has reacted to yet
        self._handling = False  # a handler is under way
        self._waits_since: float | None = None  # of a signal that is still to be raised
        self._raised_at = -math.inf
        self._before = {
            number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not signal.SIG_IGN
        }
        self._alarm_before = signal.getsignal(signal.SIGALRM)
        self._hook_before = sys.unraisablehook

    def begin(self) -> None:
        sys.unraisablehook = self._dropped
        signal.signal(signal.SIGALRM, self._again)
        for number in self._before:
            signal.signal(number, self._heard)

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGALRM, self._alarm_before)
        sys.unraisablehook = self._hook_before

    def ignore(self) -> None:
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def take(self) -> bool:
        """Whether a signal is to interrupt the block; it waits no longer."""
        self._waits_since = None
        return self.requested

    def raise_waiting(self) -> None:
        if self._waits_since is not None:
            self._raised()
            raise KeyboardInterrupt

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)
        self._go_on(frame)

    def _again(self, _: int, frame: FrameType | None) -> None:
        self._go_on(frame)

    def _go_on(self, frame: FrameType | None) -> None:
        """React to one signal that has arrived, and raise for one that waits, as far as that is possible now."""
        if self._handling:  # a signal within the handler of another, of which an exception here would leave nothing
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
            return
        self._handling, raises = True, False
        try:
            if self._arrived and self._react(self._arrived.pop(0)):
                self.requested = True
                if self._waits_since is None:
                    self._waits_since = time.monotonic()
            raises = self._waits_since is not None and not self._has_to_wait(self._waits_since, frame)
            if raises:
                self._raised()
            if self._arrived or self._waits_since is not None:
                signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        finally:
            self._handling = False
        if raises:
            raise KeyboardInterrupt

    def _has_to_wait(self, since: float, frame: FrameType | None) -> bool:
        now = time.monotonic()
        settling = now < self._raised_at + SETTLING_SECONDS
        return (settling or self.holds > 0 or _drops(frame)) and now < since + WAIT_SECONDS

    def _raised(self) -> None:
        self._waits_since, self._raised_at = None, time.monotonic()

    def _dropped(self, unraisable: UnraisableHookArgs) -> None:
        """Called with an exception that Python could not raise: a KeyboardInterrupt of this block is raised again."""
        if self.requested and issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._waits_since, self._raised_at = time.monotonic(), -math.inf
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        else:
            self._hook_before(unraisable)


_current: _Handlers | None = None


@contextlib.contextmanager
def interruptible(react: Callable[[int], bool] = lambda _: True, *, outlives: bool = False) -> Iterator[None]:
    """A block that signals interrupt, as Ctrl-C does. `react` is called with each signal; False ignores that one.

    `outlives`: after a signal the handlers stay for the rest of the program. Signals that the program was started to
    ignore stay ignored. For the main thread alone.
    """
    global _current
    outer, handlers = _current, _Handlers(react)
    if outlives:
        atexit.register(handlers.ignore)  # before Ray registers its end, hence after it: the exit code is settled then
    _current = handlers
    handlers.begin()
    try:
        yield
    finally:
        if _current is handlers and not (outlives and handlers.requested):
            atexit.unregister(handlers.ignore)
            handlers.end()
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
def held() -> Iterator[None]:
    """A block that a signal does not break off, unless it takes longer than WAIT_SECONDS: it is raised at its end."""
    handlers = _current
    if handlers is None:
        yield
        return
    handlers.holds += 1
    try:
        yield
    finally:
        handlers.holds -= 1
    handlers.raise_waiting()


@contextlib.contextmanager
def released() -> Iterator[None]:
    """A part of a `held` block that signals interrupt all the same.

    Nothing in threads beside the main one, which alone is interrupted: they `look`.
    """
    handlers = _current
    if handlers is None or handlers.holds == 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers.holds -= 1
    try:
        handlers.raise_waiting()
        yield
    finally:
        handlers.holds += 1


def end_requested() -> bool:
    """Whether a signal is to interrupt the command, which its caller then ends.

    For use only before the first interruption: a signal that did not interrupt by then was dropped.
    """
    return _current is not None and _current.take()


def look() -> None:
    """Raise KeyboardInterrupt when `end_requested`. For loops that wait."""
    if end_requested():
        raise KeyboardInterrupt


def _drops(frame: FrameType | None) -> bool:
    """Whether the code under way is a destructor's or an import's, which an exception may never leave."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
