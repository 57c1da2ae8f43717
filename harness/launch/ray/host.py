"""One host's end: a Ray actor that describes and checks its host, supervises its ranks and streams their files."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster.discovery.facts import NodeFacts
from cluster.discovery.read import read_node
from cluster.environment.rendering import render_node
from cluster.environment.value import overlaid
from cluster.inventory.checkout import own_versions
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import Site
from cluster.transport.reach import LocalRunner, connect_local
from harness.launch.launcher import Job
from harness.launch.ports import Listener, reserve_port
from harness.launch.supervisor import Supervisor
from harness.launch.verdict import Watched
from harness.machine.this_machine import Machine, discover

# Variables that Ray sets for its workers and ranks must not have: its settings, threads and GPUs. `burst cluster up`
# keeps the values of the node's login under other names.
_RAYS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD")
_KEPT = "BURST_"
# The launcher gives a silent host up after about 11 s; its ranks then have 5 s to end before they are killed.
CUT_OFF_SECONDS = 14.0
PROBE_SECONDS = 2.0
CHECK_SECONDS = 20.0  # for one look at GPUs and processes
DECISIVE = ("gpus", "processes")  # the checks that decide about a run; `burst cluster check` has the others
FETCH_BYTES = 64 * 2**20  # of one trial's files from one host; logs that have run away are cut
_LOG_BYTES = 8 * 2**20
# Interfaces and routes: the trial's values were rendered on one machine, so those of each host replace them.
_ROUTES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_")
# The GPUs visible in the launching shell are not those of another host.
LAUNCHERS_OWN = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")

Files = dict[str, tuple[bytes, float]]  # content and time of change, by path relative to the trial directory


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A host in its own words."""

    machine: dict[str, Any]  # fields of a `Machine`
    versions: Mapping[str, str | None]  # that must be those of the launching machine
    python: str
    folder: str  # of its own, for ranks that do not see the launcher's storage
    root: str = ""  # what stands there for the root of an exchange; empty: one in `folder` for each job


class HostActor:
    """Runs parts of jobs, one after another. `progress` and `cancel` are called while it runs (`max_concurrency`)."""

    def __init__(
        self, name: str, site: Site, *, own_gpus: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        """`name` is the host's in records, `environment` that of a shell on it; None: from that of this Ray worker.
        `own_gpus`: Ray has assigned GPUs, which are those of the ranks."""
        if environment is None:
            environment = host_environment(os.environ, own_gpus=own_gpus)
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides all GPUs from a worker that has asked for none
            os.environ |= {name: value for name, value in environment.items() if name == "CUDA_VISIBLE_DEVICES"}
        self._name, self._site = name, site
        self._supervisor = Supervisor(environment)
        self._progress: list[dict[str, object]] = []
        self._port = contextlib.ExitStack()
        self._folder = own_folder(name)
        self._described: Machine | None = None
        self._facts: NodeFacts | None = None

    def describe(self) -> Description:
        self._described = discover()
        return Description(
            machine=asdict(self._described),
            versions=own_versions(),
            python=sys.executable,
            folder=str(self._folder),
        )

    def unfit(self) -> str:
        """Why the host cannot be used now, as far as that shows in its GPUs and its processes; empty when it can.

        A look that takes too long is no reason: a busy host answers slowly.
        """
        from cluster import checks
        from cluster.health.nodes import check_nodes

        machine = discover()
        if self._described is not None and machine.gpu_count < self._described.gpu_count:
            problem = f" ({machine.gpu_problem})" if machine.gpu_problem else ""
            return f"{machine.gpu_count} of its {self._described.gpu_count} GPUs answer{problem}"
        if machine.device == "cpu":
            return ""
        node = InventoryNode(host=Host(name=self._name), site=self._site)
        decisive = {name: check for name, check in checks.discover().items() if name in DECISIVE}
        for report in check_nodes([node], connect_local, decisive, CHECK_SECONDS):
            for verdict in report.verdicts.values():
                if verdict.level == "fail" or verdict.busy:
                    return verdict.summary
        return ""

    def environment(self, part: Job, user: Mapping[str, str], head: str, *, alone: bool) -> dict[str, str]:
        """The environment of a part of a job: as `burst cluster env` renders it here, under the trial's own values.

        `user` is what the user has set, `head` the head's address, towards which routes count, and `alone` says that
        no other host takes part.
        """
        if self._facts is None:
            self._facts = read_node(
                self._name, LocalRunner(), self._site, head=head, deadline_seconds=2 * CHECK_SECONDS
            )
        rendered = render_node(self._facts, self._site, ranks=len(part.own_ranks))
        values = overlaid(rendered.values, user, by="set in the shell burst was started from", origin="user")
        of_host = {value.name: value.value for value in values if not (alone and value.name.startswith(_ROUTES))}
        decided = {
            value.name
            for value in values
            if value.name in of_host and (value.origin in ("site", "user") or value.name.startswith(_ROUTES))
        }
        of_trial = {
            name: value for name, value in part.environment.items() if name not in decided and name not in LAUNCHERS_OWN
        }
        return {**of_host, **of_trial}

    def reserve(self) -> int:
        """A port for the ranks' rendezvous, held until `release`."""
        self.release()
        return self._port.enter_context(reserve_port())

    def release(self) -> None:
        self._port.close()

    def sees(self, path: str, content: str, root: str = "") -> bool:
        """Whether the launcher's file is here too, as on shared storage; `root` is that of the job's exchange."""
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
        head = Listener(address, port, CUT_OFF_SECONDS)
        while not over.wait(PROBE_SECONDS):
            if head.is_lost() and not over.is_set():
                self._supervisor.cancel(may_save=False)
                return

    def progress(self, seen: int) -> list[dict[str, object]]:
        """Progress lines of the running job after the first `seen`."""
        return self._progress[seen:]

    def fetch(self, trial_dir: str) -> Files:
        """The ranks' files in a directory of this host's own."""
        return left_files(Path(trial_dir))

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
        with contextlib.suppress(OSError):  # what ranks have left there is fetched by a later start
            self._folder.rmdir()


def host_environment(environment: Mapping[str, str], *, own_gpus: bool) -> dict[str, str]:
    """The environment of a shell on the host, from that of a Ray worker there. `own_gpus`: see `HostActor`."""
    rays = [name for name in _RAYS if not (own_gpus and name == "CUDA_VISIBLE_DEVICES")]
    own = {name: value for name, value in environment.items() if not name.startswith("RAY_") and name not in rays}
    for name in _RAYS:
        if (value := own.pop(_KEPT + name, None)) is not None:
            own.setdefault(name, value)
    return own


def own_folder(name: str) -> Path:
    """A folder of this user and host, for files of ranks; the same one each time, so that a run finds what an earlier
    start has left. Hosts of one machine may share the temporary folder. Raises OSError where it is not this user's."""
    folder = Path(tempfile.gettempdir(), f"burst-{os.getuid()}-{name}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; remove it")
    folder.chmod(0o700)
    return folder


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
