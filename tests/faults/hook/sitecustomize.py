"""Holds a process of `burst` at one named moment of a trial, until a test lets it go on.

Python imports a module of this name when it starts, so a folder on PYTHONPATH puts the hook into every process of a
run, and nothing of it is in the product. Moments are recognised by what the interpreter is about to do, which it tells
its audit hooks (PEP 578): open a file, to import it or otherwise, or rename one. The first process to get there writes
its number to `reached`, and waits for `released`.

BURST_TEST_HOLD names a folder. The hook is there where the folder has a `hold.json` when the process starts: an object
of `event` (open, write or rename), `names` (a regular expression for the end of the path), `after` (the same for a path
that the process has renamed something to before; empty for none), `count` (which such event of a process, from 1),
`program` (words of its command line) and `rank` (empty for a process that is none).

BURST_TEST_PYTHON is the program that started this interpreter with these variables, where a host's login lacks them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time


class Hold:
    """The audit hook."""

    def __init__(self, folder: str, event: str, names: str, after: str, count: int, program: str, rank: str) -> None:
        self.event, self.left, self.rank, self.folder = event, count, rank, folder
        self.names = re.compile(f"(?:{names})$")
        self.after = re.compile(f"(?:{after})$") if after else None
        self.here = program in " ".join(sys.orig_argv)
        self.done = False

    def __call__(self, event: str, details: tuple[object, ...]) -> None:
        if self.done or not self.here or event not in ("open", "os.rename"):
            return
        if self.after is not None:
            if event == "os.rename" and self.after.search(self.subject(event, details)):
                self.after = None
            return
        found = self.kind(event, details) == self.event and self.names.search(self.subject(event, details))
        if found and os.environ.get("RANK", "") == self.rank:
            self.left -= 1
            if self.left == 0:
                self.done = True  # before the files below are opened
                self.wait()

    def kind(self, event: str, details: tuple[object, ...]) -> str:
        if event == "open":
            flags = details[2]
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            return "write" if writes else "open"
        return event.removeprefix("os.")

    def subject(self, event: str, details: tuple[object, ...]) -> str:
        """What is opened, or what a file is renamed to."""
        named = details[1 if event == "os.rename" else 0]
        return os.fsdecode(named) if isinstance(named, str | bytes | os.PathLike) else ""

    def wait(self) -> None:
        reached, released = (os.path.join(self.folder, name) for name in ("reached", "released"))
        try:
            descriptor = os.open(f"{reached}.part", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:  # another process was first
            return
        os.write(descriptor, str(os.getpid()).encode())
        os.close(descriptor)
        os.rename(f"{reached}.part", reached)
        # Not for ever: a test that was killed lets nobody go.
        give_up = time.monotonic() + 300
        while not os.path.exists(released) and time.monotonic() < give_up:
            time.sleep(0.01)


if python := os.environ.get("BURST_TEST_PYTHON"):
    sys.executable = python
if folder := os.environ.get("BURST_TEST_HOLD"):
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, "hold.json"), encoding="utf-8") as file:
        sys.addaudithook(Hold(folder, **json.load(file)))
