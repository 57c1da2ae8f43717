"""One `burst run` under a fault: its processes by role, the moment at which it is held, and what it leaves.

All processes inherit a mark in their environment, by which they are found however they are named and grouped.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.cli import main
from tests.faults.matrix import TRIALS, Point
from tests.hosts.ray_head import ray_head
from tests.patience import AMPLE, wait_until
from tests.processes import command_of, kill, output_of, parent_of, with_variable

PROJECT = Path(__file__).parents[2]
HOOK = Path(__file__).parent / "hook"
MARK = "BURST_TEST_RUN"
GONE_SECONDS = 15.0  # by then nothing of a run is left

EXPERIMENT = """\
title: Attention that is disturbed
task: attention
model: tiny
sweep: {seq_len: [64, 128, 192, 256]}
fixed: {method: burst, cp_size: 2, dtype: fp32}
steps: {warmup: 2, measured: 2}
"""


class Command:
    """`burst run` in a folder, held at a point if there is one. Use `started`."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        point: Point | None,
        prefix: Sequence[str] = (),
        ray_port: int | None = None,
    ) -> None:
        self.mark = secrets.token_hex(8)
        self.hold = folder / f"hold-{self.mark}"
        self.hold.mkdir()
        if point:
            point.hold_in(self.hold)
        self.output = self.hold / "output"
        marked = {**variables(self.hold), MARK: self.mark}
        self._closing, self._over_ray = contextlib.ExitStack(), ray_port is not None
        if ray_port is not None:
            head = self._closing.enter_context(ray_head(environment=marked, port=ray_port))
            marked |= head.environment
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "harness", *arguments],
                cwd=folder,
                env={**os.environ, **marked},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for_hold(self) -> int:
        """Wait until a process is held; returns its number."""
        return wait_for_hold(self.hold, self.process, self.said)

    def release(self) -> None:
        (self.hold / "released").touch()

    def end(self) -> int:
        """Wait for the command's end; returns its exit code."""
        self.process.wait(AMPLE)
        return self.process.returncode

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def processes(self) -> list[int]:
        """All processes that run, or are stopped, and carry the mark."""
        return with_variable(MARK, self.mark)

    def left(self) -> list[int]:
        """Those that are not of a Ray cluster that stays up: its idle workers and daemons."""
        return [pid for pid in self.processes() if not (self._over_ray and _is_rays(pid))]

    def wait_until_gone(self) -> None:
        def left() -> str:
            return f"{ {pid: command_of(pid) for pid in self.left()} } still run:\n{self.said()}"

        wait_until(lambda: not self.left(), left, GONE_SECONDS)
        self._closing.close()

    def kill_all(self) -> None:
        """For the end of a test that failed."""
        kill(self.processes())
        self.process.wait(AMPLE)
        self._closing.close()

    def fork_server(self) -> int:
        """The newest one: an idle one may wait beside it."""
        zygotes = self._zygotes()
        return max(pid for pid in zygotes if parent_of(pid) not in zygotes)

    def rank(self, number: int) -> int:
        """The process of a rank, which writes to the rank's log."""
        found: list[int] = []

        def there() -> bool:
            found[:] = [pid for pid in self.processes() if output_of(pid).endswith(f"/logs/rank{number}.log")]
            return bool(found)

        wait_until(there, f"rank {number} has no process")
        return found[0]

    def ray_head(self) -> int:
        [pid] = [pid for pid in self.processes() if "gcs_server" in command_of(pid).partition(" ")[0]]
        return pid

    def supervisor(self) -> int:
        """The process that started the fork server; without Ray the command itself."""
        return parent_of(self.fork_server())

    def _zygotes(self) -> list[int]:
        return [pid for pid in self.processes() if "harness.launch.zygote" in command_of(pid)]


def variables(hold: Path) -> dict[str, str]:
    """What puts the hook into a program, and into those that it starts."""
    # Without git no record names a commit: one that is made, or a file that is edited, while tests run would not mix.
    return {"BURST_TEST_HOLD": str(hold), "PYTHONPATH": f"{HOOK}{os.pathsep}{PROJECT}", "GIT_DIR": os.devnull}


def wait_for_hold(hold: Path, process: subprocess.Popen[Any], said: Callable[[], object]) -> int:
    """Wait until a process of a command is held; returns its number. `said` gives what the command printed."""
    reached = hold / "reached"
    wait_until(lambda: reached.exists() or process.poll() is not None, "no process came to the point", 120)
    assert reached.exists(), f"the command ended before it came to the point:\n{said()}"
    return int(reached.read_text())


@contextlib.contextmanager
def started(
    folder: Path, arguments: Sequence[str], point: Point | None, prefix: Sequence[str] = (), ray_port: int | None = None
) -> Iterator[Command]:
    """`ray_port`: a Ray cluster of this machine alone is up meanwhile, with its head at this port."""
    command = Command(folder, arguments, point, prefix, ray_port)
    try:
        yield command
    finally:
        command.kill_all()


def _is_rays(pid: int) -> bool:
    """Whether a process is Ray's, and no supervisor, fork server or rank of ours."""
    command = command_of(pid)
    return "ray" in command and "HostActor" not in command and "harness" not in command


def burst(folder: Path, *arguments: str, ray_port: int | None = None) -> tuple[int, str]:
    """Exit code and output of a command that nothing disturbs; nothing of it is left."""
    with started(folder, arguments, None, ray_port=ray_port) as command:
        code = command.end()
        command.wait_until_gone()
        return code, command.said()


def next_command(run_dir: Path) -> list[str]:
    """The command that `burst status` tells to go on with; empty for none."""
    code, said = _asked("status", str(run_dir))
    lines = [line for line in said.splitlines() if ": burst " in line]
    assert len(lines) <= 1, said
    assert code == 0 or (code == 2 and "cannot be used" in said), said
    return shlex.split(lines[0].partition(": ")[2]) if lines else []


def failures(run_dir: Path) -> list[dict[str, str]]:
    """What `burst verify` finds wrong, except that records name no commit here."""
    _, said = _asked("verify", str(run_dir), "--json")
    [verdict] = json.loads(said)["runs"]
    return [failure for failure in verdict["failures"] if failure["check"] != "commit"]


def _asked(*arguments: str) -> tuple[int, str]:
    """Exit code and output of a command that starts nothing, in this process because that is quicker."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(arguments)
    return code, said.getvalue()


def records(run_dir: Path) -> Mapping[str, bytes]:
    """The bytes of each trial's record, by trial."""
    return {path.parent.name: path.read_bytes() for path in sorted(run_dir.glob("trials/*/record.json"))}


def status_of(record: bytes) -> str:
    """The status that a record gives, `torn` for what is no JSON."""
    try:
        return str(json.loads(record)["status"])
    except ValueError:
        return "torn"


def length_of(trial: str) -> int:
    """The trial's tokens, from its id."""
    return int(trial.split("-s")[1].split("-")[0])


def outcomes(found: Mapping[str, bytes]) -> str:
    """The status of each trial in the order in which they run, `-` for a trial without a record."""
    by_length = {length_of(trial): status_of(record) for trial, record in found.items()}
    return " ".join(by_length.get(length, "-") for length in TRIALS)
