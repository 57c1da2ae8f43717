"""Ends Ray's agents and removes its files when the owner of an embedded Ray died: both would outlive a SIGKILL.

`python -m harness.launch.ray.janitor DIRECTORY`: waits for its stdin to close, which the kernel does whenever the owner
ends, then ends the processes that carry DIRECTORY in their environment and removes DIRECTORY.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

from harness.launch.forkserver import with_project
from harness.launch.zygote import of_all_processes

MARK = "BURST_RAY_DIRECTORY"  # set for the processes of one embedded Ray
GRACE_SECONDS = 5.0  # for Ray's own shutdown, which is usually quick
LAST_LOOKS = 3  # that find none left: while a process is about to execute its program, it has no environment to read


class Janitor:
    """The owner's end of a janitor."""

    def __init__(self, directory: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.launch.ray.janitor", directory],
            env={**os.environ, "PYTHONPATH": with_project(os.environ.get("PYTHONPATH", ""))},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def finish(self) -> None:
        """After Ray's shutdown: remove the rest, and wait for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main(directory: str) -> None:
    sys.stdin.buffer.read()
    give_up = time.monotonic() + GRACE_SECONDS
    while marked(directory) and time.monotonic() < give_up:
        time.sleep(0.1)
    looks = 0
    while looks < LAST_LOOKS:
        left = marked(directory)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        looks = 0 if left else looks + 1
        time.sleep(0.05)
    shutil.rmtree(directory, ignore_errors=True)


def marked(directory: str) -> list[int]:
    """Running processes of the Ray in `directory`. Processes of other users cannot be read, and never belong to it."""
    mark = f"{MARK}={directory}".encode()
    # A zombie's environment is empty.
    return [pid for pid, environment in of_all_processes("environ") if mark in environment.split(b"\0")]


if __name__ == "__main__":
    main(sys.argv[1])
