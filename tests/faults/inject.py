"""The faults themselves, each done to a command that is held at a point of its run."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults import matrix
from tests.faults.command import Command, length_of, records
from tests.faults.matrix import Fault, Point
from tests.patience import running, wait_for_end, wait_until

DISK_SIZE = "8m"
# Root is refused what a file's mode forbids only without these.
_OVERRIDES = "-dac_override,-dac_read_search"


def unavailable(fault: Fault) -> str:
    """Why a fault cannot be made on this machine; empty when it can."""
    root = os.geteuid() == 0
    if fault is matrix.DISK and not root:
        return "mounting a small disk needs root"
    if fault is matrix.PERMISSIONS and root and shutil.which("setpriv") is None:
        return "needs setpriv (util-linux), to run without root's right to write anywhere"
    return ""


def prefix(fault: Fault) -> list[str]:
    """What stands before the command that is to be disturbed."""
    if fault is matrix.PERMISSIONS and os.geteuid() == 0:
        return ["setpriv", f"--inh-caps={_OVERRIDES}", f"--bounding-set={_OVERRIDES}"]
    return []


@contextlib.contextmanager
def small_disk(fault: Fault, place: Path) -> Iterator[None]:
    """A disk of DISK_SIZE at `place`, for the fault that fills it."""
    if fault is not matrix.DISK:
        yield
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "faults", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


@contextlib.contextmanager
def happens(fault: Fault, point: Point, command: Command, held: int, run_dir: Path) -> Iterator[None]:
    """The fault happens while process `held` is held. What a user would repair before the next command is repaired at
    the end of the block."""
    mend: Callable[[], object] = lambda: None  # noqa: E731 - most faults leave nothing to mend
    if fault is matrix.WORKER:
        _kill(command.rank(1))
    elif fault is matrix.FORK_SERVER:
        _kill(command.fork_server())
    elif fault is matrix.LAUNCHER:
        _kill(command.process.pid)
    elif fault is matrix.RAY_HEAD:
        _kill(command.ray_head())
        if held != command.process.pid:  # a rank or fork server works on without a head, so the launcher ends it
            wait_until(lambda: not running(held), "the launcher did not notice that Ray's head is gone")
    elif fault is matrix.SUPERVISOR:
        _kill(command.supervisor())
    elif fault is matrix.STALL:
        os.kill(command.fork_server() if point.name == "import" else command.rank(1), signal.SIGSTOP)
    elif fault is matrix.DISK:
        mend = _fill(run_dir.parent / "filler")
    elif fault is matrix.PERMISSIONS:
        mend = _forbid(run_dir)
    else:
        assert fault is matrix.TORN, fault
        first = min(records(run_dir), key=length_of)
        path = run_dir / "trials" / first / "record.json"
        os.truncate(path, path.stat().st_size // 2)
    try:
        yield
    finally:
        mend()


def _kill(pid: int) -> None:
    """Returns when it has ended: its sockets are closed and its shared memory is gone by then."""
    os.kill(pid, signal.SIGKILL)
    wait_for_end([pid])


def _fill(filler: Path) -> Callable[[], object]:
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler.unlink


def _forbid(run_dir: Path) -> Callable[[], object]:
    """Take the right to write to the run's folder, and to everything in it, from all users."""
    modes = {path: path.stat().st_mode for path in (run_dir, *run_dir.rglob("*"))}
    for path, mode in modes.items():
        path.chmod(mode & ~0o222)

    def allow() -> None:
        for path, mode in modes.items():
            path.chmod(mode)

    return allow
