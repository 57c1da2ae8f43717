"""One host's end of a cluster launcher: a Ray actor that supervises its ranks and returns their files."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from cluster.ray_cluster.node_program import KEPT
from harness.launch.launcher import Job
from harness.launch.ports import answers, reserve_port
from harness.launch.supervisor import Supervisor
from harness.launch.verdict import Watched

# Variables that Ray sets for its workers and ranks must not have: Ray's settings, and its threads and GPUs.
_RAYS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD")
# The launcher gives a silent host up after about 11 s; its ranks then have 5 s to end before they are killed.
CUT_OFF_SECONDS = 14.0
PROBE_SECONDS = 2.0
FETCH_BYTES = 64 * 2**20  # of one trial's files from one host; logs that have run away are cut
_LOG_BYTES = 8 * 2**20

Files = dict[str, tuple[bytes, float]]  # content and time of change, by path relative to the trial directory


class NodeActor:
    """Runs parts of jobs, one after another. `progress` and `cancel` are called while it runs (`max_concurrency`)."""

    def __init__(self) -> None:
        self._supervisor = Supervisor(node_environment(os.environ))
        self._progress: list[dict[str, object]] = []
        self._port = contextlib.ExitStack()

    def reserve(self) -> int:
        """A port for the ranks' rendezvous, held until `release`."""
        self.release()
        return self._port.enter_context(reserve_port())

    def release(self) -> None:
        self._port.close()

    def sees(self, path: str, content: str) -> bool:
        """Whether the launcher's file is here too, as on shared storage."""
        try:
            return Path(path).read_text(encoding="utf-8") == content
        except OSError:
            return False

    def stage(self, trial_dir: str, files: Mapping[str, bytes]) -> None:
        """Make a trial directory of this host's own, in place of an earlier attempt's."""
        shutil.rmtree(trial_dir, ignore_errors=True)
        for name, content in files.items():
            path = Path(trial_dir, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def watch(self, job: Job, head: tuple[str, int] | None = None) -> Watched:
        """Run this host's part of a job to its end, or until it has not reached `head`, address and port of the
        cluster's, for CUT_OFF_SECONDS: the launcher has then given this host up, and only this host can end its ranks.
        """
        self._progress = []
        over = threading.Event()
        if head is not None:
            threading.Thread(target=self._guard, args=(*head, over), daemon=True).start()
        try:
            return self._supervisor.watch(job, self._progress.append)
        finally:
            over.set()

    def _guard(self, address: str, port: int, over: threading.Event) -> None:
        """Cancel the job when the head accepts no connection for too long. It needs only the head's kernel."""
        reached_at = time.monotonic()
        while not over.wait(PROBE_SECONDS):
            if answers(address, port):
                reached_at = time.monotonic()
            elif time.monotonic() - reached_at > CUT_OFF_SECONDS and not over.is_set():
                self._supervisor.cancel(may_save=False)
                return

    def progress(self, seen: int) -> list[dict[str, object]]:
        """Progress lines of the running job after the first `seen`."""
        return self._progress[seen:]

    def fetch(self, trial_dir: str) -> Files:
        """The ranks' files in a directory of this host's own, which is then removed."""
        found = left_files(Path(trial_dir))
        shutil.rmtree(trial_dir, ignore_errors=True)
        return found

    def files(self, folder: str) -> dict[str, int]:
        """Size of every file below a folder, by relative path; none where there is no folder."""
        paths = [path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()]
        return {str(path.relative_to(folder)): path.stat().st_size for path in paths}

    def read(self, path: str, first: int, length: int) -> bytes | None:
        """A piece of a file; None where there is no such file."""
        try:
            with open(path, "rb") as file:
                file.seek(first)
                return file.read(length)
        except FileNotFoundError:
            return None

    def write(self, path: str, first: int, content: bytes) -> None:
        """A piece of a file, which the first piece makes anew."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "r+b" if first else "wb") as file:
            file.seek(first)
            file.write(content)

    def remove(self, folder: str) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def cancel(self, stacks: bool = False, may_save: bool = True) -> None:
        self._supervisor.cancel(stacks, may_save)

    def close(self) -> None:
        self.release()
        self._supervisor.close()


def node_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a shell on the node, from that of a Ray worker there."""
    own = {name: value for name, value in environment.items() if not name.startswith("RAY_") and name not in _RAYS}
    for name, kept in KEPT.items():
        if (value := own.pop(kept, None)) is not None:
            own[name] = value
    return own


def left_files(trial_dir: Path) -> Files:
    """All files below a directory, logs by their end, up to FETCH_BYTES together; the small ones first."""
    found: Files = {}
    room = FETCH_BYTES
    paths = [path for path in trial_dir.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in sorted(paths, key=lambda path: path.stat().st_size):
        status = path.stat()
        keep = min(status.st_size, _LOG_BYTES if path.suffix == ".log" else room)
        if keep > room or (path.suffix != ".log" and keep < status.st_size):
            continue
        with open(path, "rb") as file:
            file.seek(status.st_size - keep)
            found[str(path.relative_to(trial_dir))] = (file.read(keep), status.st_mtime)
        room -= keep
    return found


def receive_files(trial_dir: Path, files: Files) -> None:
    """Write a host's files into the launcher's trial directory, with their times, by which failures are ordered."""
    for name, (content, changed) in files.items():
        path = trial_dir / name
        if not path.resolve().is_relative_to(trial_dir.resolve()):
            continue  # a host's file name must not lead out of the trial's directory
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (changed, changed))
