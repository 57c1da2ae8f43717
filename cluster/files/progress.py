"""What a command is doing, on stderr, where it takes long: one way for all commands."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable

from cluster.files.errors import shown

FIRST_SECONDS = 1.5  # until a stage is named; most commands have ended by then and stay silent
AGAIN_SECONDS = 10.0  # between two lines of one stage


def say(sentence: str) -> None:
    """A sentence beside the result of a command, on stderr."""
    print(shown(sentence), file=sys.stderr, flush=True)


class Progress:
    """A block that names the stage it is in, such as "reading 12 runs", once that has lasted FIRST_SECONDS.

    A stage that goes on is said again every AGAIN_SECONDS if it is farther then, as `so_far` tells. A stage without a
    name is not said, nor is any where `quiet`, for --json. `out` prints a line, by default on stderr.
    """

    def __init__(self, stage: str, *, quiet: bool = False, out: Callable[[str], None] = say) -> None:
        self._out, self._quiet = out, quiet
        self._doing = (stage, "")
        self._said = ("", "")
        self._began_at = self._said_at = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def stage(self, stage: str) -> None:
        """The block is in this stage from now on."""
        self._began_at = time.monotonic()
        self._doing = (stage, "")

    def so_far(self, detail: str) -> None:
        """How far the stage is, such as "3 of 12 runs"."""
        self._doing = (self._doing[0], detail)

    def say(self, sentence: str) -> None:
        """A sentence of its own, at once."""
        self._said_at = time.monotonic()
        self._out(sentence)

    def __enter__(self) -> Progress:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(FIRST_SECONDS / 8):
            if (line := self.due(time.monotonic())) is not None:
                with contextlib.suppress(OSError, ValueError):  # stderr is closed: the command goes on
                    self.say(line)

    def due(self, now: float) -> str | None:
        """The line to print at this time, if there is one."""
        doing = stage, detail = self._doing
        new = stage != self._said[0]
        since, patience = (self._began_at, FIRST_SECONDS) if new else (self._said_at, AGAIN_SECONDS)
        if not stage or doing == self._said or now - since < patience:
            return None
        self._said = doing
        return f"{stage}: {detail}" if detail else stage
