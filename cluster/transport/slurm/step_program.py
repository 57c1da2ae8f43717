"""The part of a connection that runs on the node, as the one task of a step. Standard library only, no import of ours.

When a step's task ends, Slurm ends all processes that it has left. So a command that leaves processes, as `ray start`
does, keeps its step: the task adopts them and waits until they end. When Slurm ends the step, the task ends last: a
Slurm that finds processes by their parents, and not by control groups, does not find those that outlive the task.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>: orphans below this process become its children
_TERM_SECONDS = 1.0  # from TERM to KILL for a command at its deadline
_LEAVE_SECONDS = 5.0  # the same where Slurm ends the step, which by itself would kill after its KillWait, often 30 s
_GIVE_UP_SECONDS = 10.0  # a process stuck in the kernel is left to Slurm
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # the exit statuses of a shell
DEADLINE = "deadline"  # in place of an exit status
# Of Slurm's variables these stay: the others describe this step, and programs would take their rank from them.
_KEPT = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURMD_NODENAME")


class _StepEnds(BaseException):
    """Slurm ends the step."""


def main(mark: str, seconds: float, command: list[str]) -> None:
    """Run the command with our streams. A line of `mark` and "+" precedes its output; "-" follows, then its status."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _ended)
    try:
        _serve(mark, seconds, command)
    except _StepEnds:
        _end_all(_LEAVE_SECONDS)
        sys.exit(128 + signal.SIGTERM)


def _serve(mark: str, seconds: float, command: list[str]) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not name.startswith(("SLURM", "SRUN", "PMI"))
    }
    for stream in (1, 2):
        _say(stream, f"{mark}+\n")  # Slurm forwards whole lines
    status = _run(command, environment, seconds)
    _say(2, f"{mark}-\n")
    _say(1, f"{mark}-{status}{' and more' if _has_children() else ''}\n")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _run(command: list[str], environment: dict[str, str], seconds: float) -> int | str:
    """The command's exit status, with 128 added to the signal that ended it; DEADLINE where it was ended here."""
    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
    except OSError as error:
        _say(2, f"{command[0]}: {error.strerror}\n")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    try:
        status = process.wait(seconds)
        return status if status >= 0 else 128 - status
    except subprocess.TimeoutExpired:
        _end_all(_TERM_SECONDS)
        return DEADLINE


def _ended(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _StepEnds


def _end_all(term_seconds: float) -> None:
    """End everything below this process: TERM, then KILL."""
    began = time.monotonic()
    told: set[int] = set()
    while _has_children() and (waited := time.monotonic() - began) < term_seconds + _GIVE_UP_SECONDS:
        late = waited >= term_seconds
        for pid in _descendants():
            if late or pid not in told:
                told.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.05)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                children.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:  # grows while it is read
        found += children.get(pid, ())
    return found


def _has_children() -> bool:
    """Whether a process that the command has started still runs; ended ones are reaped."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _say(stream: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the reader has gone
        os.write(stream, text.encode())


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
