"""The launcher that uses Ray: a supervisor actor in a placement group starts the ranks as its own child processes.

On one machine Ray is embedded: started here, private to this process, and ended with it. A Ray that another
program started is neither used nor changed. Ranks are not Ray workers, because they need fresh processes, an
environment of their own and an end that does not depend on Ray.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cluster.inventory.software import RAY_SETTINGS
from harness.base.errors import StartError, UsageError
from harness.base.interrupts import look
from harness.launch.launcher import Job, Outcome
from harness.launch.limits import longest_seconds
from harness.launch.ports import answers
from harness.launch.ray.janitor import MARK, Janitor
from harness.launch.supervisor import Supervisor

if TYPE_CHECKING:
    from types import ModuleType

    from ray.actor import ActorHandle

POLL_SECONDS = 0.2
PLACEMENT_SECONDS = 60.0  # to start the actor; a busy two-core machine needs a few
ENDING_SECONDS = 30.0  # for the actor to end its ranks
# Between probes of Ray's head. Supervisors work on without it, but after a minute Ray ends every process that uses it,
# this one too, without a word of ours.
HEAD_PROBE_SECONDS = 2.0
OBJECT_STORE_BYTES = 80 * 2**20  # only jobs and progress lines pass through it; Ray refuses less than 75 MiB

SETTINGS = {
    **RAY_SETTINGS,
    # Other users of this machine reach loopback too, so callers need a token. Ray requires one by itself when no mode
    # is set. It is set here because Ray would otherwise save it in the user's home directory, and is one per process
    # because Ray caches it.
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # Ray replaces 127.0.0.1 by an address that other machines reach, and then listens on all interfaces, unless this
    # variable says that there is no cluster. Its name is that of its use elsewhere; it is read when Ray is imported.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
UNSET = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")


class SupervisorActor:
    """A `Supervisor` that answers `progress` and `cancel` while it runs (`max_concurrency` above 1)."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._supervisor = Supervisor(environment)
        self._progress: list[dict[str, object]] = []

    def run(self, job: Job) -> Outcome:
        self._progress = []
        return self._supervisor.run(job, self._progress.append)

    def progress(self, seen: int) -> list[dict[str, object]]:
        """Progress lines of the running job after the first `seen`."""
        return self._progress[seen:]

    def cancel(self) -> None:
        self._supervisor.cancel()

    def close(self) -> None:
        self._supervisor.close()


class RayLauncher:
    """`--launcher ray` on one machine."""

    name = "ray"

    def __init__(self) -> None:
        """Raises UsageError when Ray is not installed. Ray itself is started by the first job."""
        # The environment of the user's shell: in Ray's workers CUDA_VISIBLE_DEVICES and OMP_NUM_THREADS are Ray's.
        self._environment = dict(os.environ)
        with environment_set(SETTINGS, without=UNSET):
            self._ray = import_ray()
        self._directory = ""  # of this process alone, with Ray's files inside; empty while no Ray runs
        self._janitor: Janitor | None = None
        self._group: Any = None
        self._actor: ActorHandle | None = None
        self._head = ("", 0)  # address and port of the Ray that runs

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        ray, started = self._ray, time.monotonic()
        try:
            actor = self._ready_actor()
            pending = actor.run.remote(job)
            seen, probed_at = 0, time.monotonic()
            try:
                done = False
                while not done:
                    look()
                    if time.monotonic() - probed_at > HEAD_PROBE_SECONDS:
                        if not answers(*self._head):
                            self._cancel(actor, pending, job)
                            return self._lost(job, started, "was ended, because Ray's head does not answer")
                        probed_at = time.monotonic()
                    done = bool(ray.wait([pending], timeout=POLL_SECONDS)[0])
                    with contextlib.suppress(ray.exceptions.GetTimeoutError):  # slow is not lost
                        for line in ray.get(actor.progress.remote(seen), timeout=ENDING_SECONDS):
                            seen += 1
                            if on_progress is not None:
                                on_progress(line)
                    if not done and time.monotonic() - started > longest_seconds(job) + 2 * ENDING_SECONDS:
                        return self._lost(job, started, "did not answer long after the deadline")
                outcome: Outcome = ray.get(pending)
                return outcome
            except ray.exceptions.RayActorError:
                raise
            except BaseException:  # Ctrl-C, or on_progress raised: the ranks end first
                self._cancel(actor, pending, job)
                raise
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, OSError):  # of a file system: as if it had been raised here
                raise error.cause from None
            raise
        except (ray.exceptions.RayActorError, ray.exceptions.RaySystemError) as error:
            return self._lost(job, started, f"was lost ({str(error).strip().splitlines()[0].rstrip('.')})")

    def close(self) -> None:
        """End the ranks, then the Ray this launcher started. Idempotent."""
        if not self._directory:
            return
        if self._actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.get(self._actor.close.remote(), timeout=ENDING_SECONDS)
        self._actor = self._group = None
        self._ray.shutdown()
        if self._janitor is not None:
            self._janitor.finish()
            self._janitor = None
        self._directory = ""

    def _cancel(self, actor: ActorHandle, pending: Any, job: Job) -> None:
        """End the ranks of the running job."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(actor.cancel.remote(), timeout=ENDING_SECONDS)
            self._ray.wait([pending], timeout=ENDING_SECONDS + (job.grace_seconds or 0))

    def _lost(self, job: Job, started: float, what: str) -> Outcome:
        """The outcome of a job whose supervisor is gone. The next job gets a new Ray."""
        self._actor = None
        self.close()
        again = f"; run again with {job.again}" if job.again else ""
        return Outcome(
            status="node_lost",
            reason=f"the supervisor of the ranks {what}{again}",
            wall_seconds=time.monotonic() - started,
            hosts=[socket.gethostname()],
        )

    def _ready_actor(self) -> ActorHandle:
        if self._actor is not None and not (answers(*self._head) and self._answers(self._actor)):
            self.close()  # it was lost while it was idle, which is no job's fault
        if self._actor is None:
            ray = self._ray
            self._start_ray()
            from ray.util.placement_group import placement_group
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            self._group = placement_group([{"CPU": 1}], strategy="STRICT_SPREAD")
            try:
                ray.get(self._group.ready(), timeout=PLACEMENT_SECONDS)
            except ray.exceptions.GetTimeoutError as error:
                raise _not_started(f"it placed no supervisor within {PLACEMENT_SECONDS:g} s") from error
            self._actor = (
                ray.remote(SupervisorActor)
                .options(
                    num_cpus=1,
                    max_concurrency=4,  # run, progress, cancel, close
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group),
                )
                .remote(self._environment)
            )
        return self._actor

    def _answers(self, actor: ActorHandle) -> bool:
        """Whether the supervisor is there. One that is slow counts as there: a job then finds out."""
        try:
            self._ray.get(actor.progress.remote(0), timeout=ENDING_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            return True
        except self._ray.exceptions.RayError:
            return False
        return True

    def _start_ray(self) -> None:
        if self._ray.is_initialized():
            raise UsageError("this process already uses a Ray of its own; end it first, or use --launcher local")
        # Ray keeps Unix sockets below its directory, whose paths may have 107 characters: TMPDIR can be too long.
        self._directory = tempfile.mkdtemp(prefix="burst-ray-", dir="/tmp")
        self._janitor = Janitor(self._directory)
        try:
            with environment_set({**SETTINGS, MARK: self._directory}, without=UNSET), signal_handlers_kept():
                self._ray.init(
                    address="local",  # a new one, even where RAY_ADDRESS or a running Ray names another
                    num_cpus=1,
                    num_gpus=0,
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    namespace=f"burst-{secrets.token_hex(4)}",
                    log_to_driver=False,  # ranks log to files
                    logging_level="ERROR",
                    _node_ip_address="127.0.0.1",
                    # Ray lets every user write to its folder, so that folder is inside one that they cannot enter.
                    _temp_dir=f"{self._directory}/ray",
                )
            address, _, port = self._ray.get_runtime_context().gcs_address.rpartition(":")
            self._head = (address, int(port))
        except Exception as error:  # Ray raises nothing more precise for most errors
            raise _not_started(" ".join(str(error).split())[:300] or type(error).__name__) from error


def _not_started(why: str) -> StartError:
    return StartError(f"Ray did not start ({why}); use --launcher local, which needs none")


def import_ray() -> ModuleType:
    """Ray. Raises UsageError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            f"several machines need Ray, which cannot be imported here ({error}); pip install 'burst-harness[ray]'"
        ) from error
    # Ray prints what befalls its nodes, in colour and between our lines, also with log_to_driver=False; a loss is told
    # by the outcome of its trial. Ray 2.60 has no public switch for this one.
    ray._private.worker._worker_logs_enabled = False
    # A call after Ray has ended would start another one, without our settings and mark. What RAY_ENABLE_AUTO_CONNECT=0
    # sets when Ray is imported:
    ray._private.auto_init_hook.enable_auto_connect = False
    module: ModuleType = ray
    return module


@contextlib.contextmanager
def environment_set(added: Mapping[str, str], without: Sequence[str]) -> Iterator[None]:
    """Variables for the processes started within the block."""
    before = {name: os.environ.get(name) for name in (*added, *without)}
    os.environ.update(added)
    for name in without:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Restore the program's own SIGTERM handler, which `ray.init` replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as answer:  # Ray's own to a SIGTERM that came meanwhile
        raise KeyboardInterrupt from answer
    finally:
        signal.signal(signal.SIGTERM, before)
