"""A driver's connection to a Ray cluster that is up, with a raylet of its own where this machine is no node of it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from cluster.files.errors import without_color
from cluster.inventory.software import RAY_SETTINGS
from harness.base.errors import UsageError
from harness.launch.ports import answers
from harness.launch.ray.watch import HostLost, Member
from harness.machine.this_machine import address_towards

JOIN_SECONDS = 60.0
SHUTDOWN_SECONDS = 10.0  # of Ray's own, which waits for a head that may be gone
HEADLESS_SHUTDOWN_SECONDS = 1.0  # where it is known to be
PROBE_SECONDS = 3.0  # between probes of the head, without which Ray reports no loss
PROBES = 3  # failed in a row, before the head counts as lost
STORE_BYTES = 100 * 2**20  # of the raylet here: only jobs, progress and files pass through it

# Runs a command until it ends, or until standard input is closed, and then removes a folder.
_UNTIL_CLOSED = """
folder=$1; shift
exec 3<&0
"$@" </dev/null 3<&- & child=$!
(read -r _ <&3; kill $child; while kill -0 $child; do sleep 0.1; done; rm -rf "$folder") 2>/dev/null &
wait $child
"""


class ClusterLost(Exception):
    """The cluster cannot be joined, or its head is gone; one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayMember(Member):
    """One host's supervisor, as a Ray actor."""

    name: str
    actor: Any
    ray: ModuleType

    def begin(self, method: str, *arguments: object, **named: object) -> object:
        return getattr(self.actor, method).remote(*arguments, **named)

    def end(self) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError):
            self.ray.kill(self.actor)

    def result(self, begun: object, seconds: float | None = None) -> Any:
        errors = self.ray.exceptions
        try:
            return self.ray.get(begun, timeout=seconds)
        except errors.GetTimeoutError:
            raise HostLost(self.name, f"no answer within {seconds:g} s") from None
        except errors.RayTaskError as error:
            if isinstance(error.cause, OSError):  # its file system failed, others may work
                why = f"{error.cause.filename or 'a file'}: {error.cause.strerror}"
                raise HostLost(self.name, why) from None
            raise  # a fault of this program on the other side, not of the host
        except errors.RayError as error:
            raise HostLost(self.name, why_lost(errors, error)) from error


def why_lost(errors: Any, error: Exception) -> str:
    """Why Ray gave a supervisor up, in our words where the kind of loss is known."""
    said = without_color(str(error))
    if re.search(r"\bnode (has |was |is )?(died|dead|terminated)", said):
        return "its Ray node is gone: the host, its network or its raylet"
    if isinstance(error, errors.RayActorError):
        return "the supervisor of its ranks has ended"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[0].rstrip(".")[:200] if lines else type(error).__name__


class RayConnection:
    """This program as a driver of the cluster at `address`. For one cluster in the life of a process."""

    def __init__(self, address: str, token_file: Path | None = None) -> None:
        """`address` is HOST:PORT of the head, or `auto`: RAY_ADDRESS, else the cluster that runs on this machine.

        `token_file` None leaves authentication to Ray's own settings. Raises UsageError where there is no such cluster
        or no Ray, and ClusterLost where it cannot be joined.
        """
        # Ray reads how to authenticate when it is first imported, and keeps that for the life of the process.
        token = {} if token_file is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)}
        self._settings = {**RAY_SETTINGS, **token}
        self._unset = () if token_file is None else ("RAY_AUTH_TOKEN",)
        with environment_set(self._settings, self._unset):
            self.ray: ModuleType = import_ray()
        if self.ray.is_initialized():
            raise UsageError("this process already uses a Ray of its own; end it first")
        self.address = _resolved(address)
        # For sentences: Ray takes a loopback address for the host's other one, which the user has not typed.
        self.named = self.address if address == "auto" else address
        self.stuck = False  # Ray waits for a head that is gone, and would do so for minutes when the program exits
        self._raylet: subprocess.Popen[bytes] | None = None
        self._directory = ""
        self._probed_at, self._probes_failed = time.monotonic(), 0
        host, _, port = self.address.rpartition(":")
        self.head = (host, int(port))
        try:
            self._join()
        except (self.ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
            self.close()
            said = " ".join(without_color(str(error)).split())[:300]
            said = said.replace(self.address, self.named)
            raise ClusterLost(f"the Ray cluster at {self.named} cannot be joined ({said})") from error
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        if not answers(*self.head):
            raise ConnectionError("no Ray answers there")
        own = address_towards(self.head[0])
        with environment_set(self._settings, (*self._unset, "RAY_ADDRESS")), signal_handlers_kept():
            if own not in self._node_addresses():
                self._start_raylet(own)
            self.ray.init(
                address=self.address,
                _node_ip_address=own,
                namespace=f"burst-{secrets.token_hex(4)}",
                log_to_driver=False,  # ranks log to files
                logging_level="ERROR",
            )

    def _node_addresses(self) -> set[str]:
        """Addresses of the cluster's nodes that are alive, asked without a raylet. Ray 2.60 has no public call."""
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        nodes = GcsClient(address=self.address).get_all_node_info(timeout=JOIN_SECONDS)
        return {node.node_manager_address for node in nodes.values() if node.state == 0}

    def _start_raylet(self, own: str) -> None:
        """Join with a raylet that offers nothing to others; a driver needs one on its machine. It ends with this
        process, however that ends: the kernel then closes the pipe that the shell reads."""
        # Paths of Unix sockets below it may have 107 characters: TMPDIR can be too long.
        self._directory = tempfile.mkdtemp(prefix="burst-guest-", dir="/tmp")
        log = Path(self._directory, "log")
        with open(log, "wb") as output:
            self._raylet = subprocess.Popen(
                [
                    *("sh", "-c", _UNTIL_CLOSED, "sh", self._directory),
                    *(sys.executable, "-u", "-m", "ray.scripts.scripts", "start", "--block"),
                    *(f"--address={self.address}", f"--node-ip-address={own}", "--num-cpus=0", "--num-gpus=0"),
                    *(f"--object-store-memory={STORE_BYTES}", f"--temp-dir={self._directory}/ray"),
                    *("--include-log-monitor=false", "--disable-usage-stats"),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in a terminal reaches this program alone
            )
        give_up = time.monotonic() + JOIN_SECONDS
        while own not in self._node_addresses():
            if self._raylet.poll() is not None or time.monotonic() > give_up:
                said = log.read_text(errors="replace") if log.exists() else ""
                lines = without_color(said).strip().splitlines()
                raise ConnectionError(f"ray start failed here: {lines[-1] if lines else 'it printed nothing'}")
            time.sleep(0.2)

    def head_lost(self) -> bool:
        """Whether the head has not answered PROBES times in a row; it is probed every PROBE_SECONDS."""
        if time.monotonic() - self._probed_at >= PROBE_SECONDS:
            self._probed_at = time.monotonic()
            self._probes_failed = 0 if answers(*self.head) else self._probes_failed + 1
        return self._probes_failed >= PROBES

    def answers(self) -> bool:
        """Whether the head answers, asked a few times: without it every other call to Ray waits for a minute, and then
        Ray ends this process without a word of ours."""
        for attempt in range(PROBES):
            if answers(*self.head):
                return True
            if attempt + 1 < PROBES:
                time.sleep(1.0)
        return False

    def nodes(self) -> list[dict[str, Any]]:
        """The cluster's nodes that are alive, as `ray.nodes` describes them, the head first."""
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        head = "node:__internal_head__"
        return sorted(alive, key=lambda node: (head not in node["Resources"], node["NodeManagerAddress"]))

    def wait(self, begun: Sequence[object], seconds: float, *, every: bool = False) -> list[object]:
        """See `harness.launch.ray.watch.Hosts`."""
        done, _ = self.ray.wait(list(begun), num_returns=len(begun) if every else 1, timeout=seconds)
        return list(done)

    def close(self, *, head_lost: bool = False) -> None:
        """Leave the cluster, which stays up, and end what was started here. Idempotent."""
        # Without the head Ray's shutdown waits for minutes or for ever; the raylet is ended all the same.
        leaving = threading.Thread(target=self.ray.shutdown, daemon=True)
        leaving.start()
        leaving.join(HEADLESS_SHUTDOWN_SECONDS if head_lost else SHUTDOWN_SECONDS)
        self.stuck = leaving.is_alive()
        if self._raylet is not None:
            assert self._raylet.stdin is not None
            self._raylet.stdin.close()
            try:
                self._raylet.wait(SHUTDOWN_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._raylet.pid, signal.SIGKILL)
                self._raylet.wait()
            self._raylet = None
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = ""


def _resolved(address: str) -> str:
    """HOST:PORT of the cluster's head. Raises UsageError where there is none, and for other kinds of addresses."""
    if "://" in address:
        raise UsageError(f"--ray {address}: expected HOST:PORT of the head, as ray start prints it, or auto")
    from ray._private.services import canonicalize_bootstrap_address_or_die

    try:
        found = canonicalize_bootstrap_address_or_die(address)
    except ConnectionError as error:
        several = "several" in str(error) or "multiple" in str(error)
        raise UsageError(
            "--ray auto: several Ray clusters run on this machine; give --ray HOST:PORT of one"
            if several
            else "--ray auto: no Ray cluster runs on this machine; start one with ray start --head, or name another "
            "one's head with --ray HOST:PORT"
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"--ray {address}: expected HOST:PORT of the head, as ray start prints it, or auto") from error
    if not found.rpartition(":")[2].isdecimal():
        raise UsageError(f"--ray {address}: expected HOST:PORT of the head, as ray start prints it, or auto")
    return str(found)


def import_ray() -> ModuleType:
    """Ray. Raises UsageError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            f"several machines need Ray, which cannot be imported here ({error}); pip install 'burst-harness[ray]'"
        ) from error
    # Ray prints events of its nodes, in colour and between our lines, also with log_to_driver=False; a loss is told
    # by the outcome of its trial. Ray 2.60 has no public switch for this one.
    ray._private.worker._worker_logs_enabled = False
    # A call after Ray has ended would start another one, without our settings. What RAY_ENABLE_AUTO_CONNECT=0 sets when
    # Ray is imported:
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
