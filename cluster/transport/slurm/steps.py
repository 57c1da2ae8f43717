"""`Connect` for the nodes of a Slurm job: each command is a step beside the job's others (`srun --overlap`, Slurm 20.11
and newer).

srun passes on arguments and standard input unchanged. The program that runs the command on the node prints a random
mark before and after the command's output, which separates it from the output of srun and of a site's prolog.
"""

from __future__ import annotations

import functools
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources

from cluster.inventory.hosts import Host
from cluster.transport.runner import (
    LocalProcess,
    Reader,
    Runner,
    RunningCommand,
    StreamRunner,
    Unreachable,
    chunks,
    drain_all,
)
from cluster.transport.slurm.step_program import DEADLINE

_PROLOG_BYTES = 65536  # kept of what is printed before the command
# The interpreter that runs this program, where the node has it at the same path; else the one on its PATH.
_INTERPRETER = 'python=$1; shift; [ -x "$python" ] || python=python3; exec "$python" -I -S "$@"'
# Reads the program from standard input: every list of processes on the node would show it in a command line.
_BOOTSTRAP = """import os, sys
size, source = int(sys.argv.pop(1)), b""
while len(source) < size: source += os.read(0, size - len(source)) or sys.exit(1)
exec(source)"""
_NO_BINDING = "lacks support for cpu binding"  # srun's only answer to --cpu-bind=none without a task plugin
_END_SECONDS = 5.0  # for srun to end after its command
# srun would read all others as its options; SLURM_EXPORT_ENV=NONE would empty the command's environment.
_PASSED_ON = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID")


@contextmanager
def connect_steps(host: Host, seconds: float) -> Iterator[Runner]:
    """`Connect` for a node of the job; each command's step must have begun within `seconds`."""
    assert host.slurm_job, host
    yield StepRunner(host, seconds)


def srun_command(host: Host, mark: str, seconds: float, command: Sequence[str]) -> list[str]:
    """The command line that runs a command on the node, and ends it there after so many seconds.

    Its standard input is `step_input`.
    """
    return [
        "srun",
        f"--jobid={host.slurm_job}",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host.name}",
        "--cpu-bind=none",  # the ranks are started from a step, and share all of the job's cores there
        "--mpi=none",
        "--chdir=/",
        "--job-name=burst",
        "--quiet",
        *("sh", "-c", _INTERPRETER, "sh", sys.executable),
        *("-c", _BOOTSTRAP, str(len(_program())), mark, f"{seconds:.3f}", *command),
    ]


def step_input(stdin: str | Iterable[bytes]) -> Iterator[bytes]:
    """The program of the step, then the input of its command."""
    yield _program()
    yield from chunks(stdin)


@functools.cache
def _program() -> bytes:
    return resources.files(__package__).joinpath("step_program.py").read_bytes()


def srun_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Our environment for srun, without the variables that stand for its options."""
    return {
        name: value
        for name, value in environment.items()
        if name in _PASSED_ON or not name.startswith(("SLURM", "SRUN"))
    }


class StepRunner(StreamRunner):
    """Runs commands on one node. Processes that a command leaves run until they end by themselves, or the job ends."""

    def __init__(self, host: Host, begin_seconds: float) -> None:
        self._host = host
        self._begin_seconds = begin_seconds

    @contextmanager
    def started(self, command: Sequence[str], stdin: str | Iterable[bytes], seconds: float) -> Iterator[RunningCommand]:
        step = _Step(self._host, command, seconds, min(seconds, self._begin_seconds))
        try:
            step.begin(stdin)
            yield RunningCommand(step.stdout, step.stderr, step.finish)
        finally:
            step.close()


class _Step:
    """One step and its srun."""

    def __init__(self, host: Host, command: Sequence[str], seconds: float, begin_seconds: float) -> None:
        self._host = host
        self._begin_seconds = begin_seconds
        self._ends_at = time.monotonic() + seconds
        mark = secrets.token_hex(16)
        try:
            self._process = LocalProcess(srun_command(host, mark, seconds, command), srun_environment())
        except FileNotFoundError:
            raise Unreachable(
                f"{host.name} is a node of Slurm's job {host.slurm_job}, and srun is not on the PATH; add it"
            ) from None
        self._out, self._err = Bracketed(self._process.stdout, mark), Bracketed(self._process.stderr, mark)
        self.stdout, self.stderr = self._out.read, self._err.read
        self._kept = False  # the command has left processes, for which the step goes on
        self._timer = threading.Timer(begin_seconds, self._give_up)
        self._timer.daemon = True

    def begin(self, stdin: str | Iterable[bytes]) -> None:
        """Send the input, and give up when the node does not begin in time."""
        self._process.feed(step_input(stdin))
        self._timer.start()

    def finish(self, readers: Sequence[Reader]) -> int | None:
        """Read to the end; the exit status, None at the deadline. Raises Unreachable for a step that broke."""
        whole = drain_all(readers, self._ends_at)
        if not self._out.begun:
            raise Unreachable(self._why(f"no step began within {self._begin_seconds:g} s"))
        if not whole:
            return None
        status, _, more = self._out.trailer.partition(" ")
        if not status:
            raise Unreachable(self._why("the step ended before its command"))
        self._kept = bool(more)
        return None if status == DEADLINE else int(status)

    def close(self) -> None:
        """End the step, unless it goes on for processes that its command has left."""
        self._timer.cancel()
        if self._kept:
            threading.Thread(target=self._process.wait, daemon=True).start()  # reaps srun when it ends
        elif not self._out.trailer or self._process.wait(_END_SECONDS) is None:
            self._process.end()

    def _give_up(self) -> None:
        if not self._out.begun:
            self._process.end()

    def _why(self, otherwise: str) -> str:
        """One sentence: what srun said last, else `otherwise`."""
        lines = map(str.strip, self._err.outside.splitlines())
        said = [line for line in lines if line and _NO_BINDING not in line]
        found = said[-1].removeprefix("srun: ").removeprefix("error: ")[:300] if said else otherwise
        job = self._host.slurm_job
        return f"srun cannot run a step on {self._host.name} in job {job} ({found}); see scontrol show job {job}"


class Bracketed:
    """Reads the part of a stream between the line `mark+` and `mark-`; the rest of that line is the trailer."""

    def __init__(self, read: Callable[[int], bytes], mark: str) -> None:
        self._read = read
        self._first, self._last = f"{mark}+\n".encode(), f"{mark}-".encode()
        self._buffer = b""
        self._outside = b""
        self._ended = False
        self.begun = False
        self.trailer = ""

    @property
    def outside(self) -> str:
        """The output of srun or a prolog before the command's; the whole output where no command began."""
        return self._outside.decode("utf-8", errors="replace")

    def read(self, size: int) -> bytes:
        """The next bytes of the command's own output; none at its end."""
        while not self._ended:
            if not self.begun:
                self._skip()
            if self.begun and (found := self._take()):
                return found
            if self._ended:
                break
            chunk = self._read(size)
            if not chunk:
                self._ended = True
                rest, self._buffer = self._buffer, b""
                if self.begun:
                    return rest  # the step broke: everything that came is given
                self._outside += rest
            self._buffer += chunk
        return b""

    def _skip(self) -> None:
        before, mark, after = self._buffer.partition(self._first)
        if mark:
            self.begun, self._buffer = True, after
            self._outside = (self._outside + before)[-_PROLOG_BYTES:]
        else:
            held = _partial(self._buffer, self._first)
            cut = len(self._buffer) - held
            self._outside = (self._outside + self._buffer[:cut])[-_PROLOG_BYTES:]
            self._buffer = self._buffer[cut:]

    def _take(self) -> bytes:
        """Bytes that belong to the command for certain; at the mark, its trailer is read once it is whole."""
        before, mark, after = self._buffer.partition(self._last)
        if not mark:
            cut = len(self._buffer) - _partial(self._buffer, self._last)
            found, self._buffer = self._buffer[:cut], self._buffer[cut:]
            return found
        if before:
            self._buffer = mark + after
            return before
        line, end, _ = after.partition(b"\n")
        if end:
            self.trailer = line.decode("ascii", errors="replace").strip()
            self._ended = True
        return b""


def _partial(content: bytes, mark: bytes) -> int:
    """Length of the longest end of `content` with which `mark` begins."""
    return next((size for size in range(min(len(content), len(mark) - 1), 0, -1) if content.endswith(mark[:size])), 0)
