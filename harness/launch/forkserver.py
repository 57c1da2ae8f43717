"""The supervisor's end of a fork server (`harness.launch.zygote`): start ranks, report their exits, end them all."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.files.filesystem import try_lock
from harness.launch.verdict import signal_name
from harness.launch.zygote import PACKET_BYTES, SWEEP_SECONDS, of_all_processes

PROJECT_ROOT = Path(__file__).resolve().parents[2]
_PREFIX = "burst-ranks-"  # of directories in the temporary folder, one per server


class ServerLost(Exception):
    """The fork server's process ended without an order; the message says how."""


class ForkServer:
    """One server process with one environment, because libraries read theirs when they are loaded.

    Starting it returns at once: orders given while it still imports are carried out when it is ready.
    """

    def __init__(self, environment: Mapping[str, str], preload: Sequence[str]) -> None:
        """`environment` is complete, not added to this process's own; `preload` names modules to import first."""
        self.environment = dict(environment)
        self._ready = False
        self._pids: dict[int, int] = {}  # ranks started and not swept
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        # Of what ranks share by name; the server removes it should this process be killed, a later run should both be.
        self._held = contextlib.ExitStack()
        self._directory = _own_directory(self._held)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "harness.launch.zygote",
                    str(theirs.fileno()), json.dumps(list(preload)), self._directory,
                ],
                env={**self.environment, "PYTHONPATH": with_project(self.environment.get("PYTHONPATH", ""))},
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal reaches the supervisor alone
            )  # fmt: skip

    def new_directory(self, prefix: str) -> tempfile.TemporaryDirectory[str]:
        """One for ranks of this server: `close` removes it, or the server when this process was killed."""
        return tempfile.TemporaryDirectory(prefix=prefix, dir=self._directory, ignore_cleanup_errors=True)

    def start(self, rank: int, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        """Order one rank; `environment` is added to the server's, `log` receives stdout and stderr."""
        self._send(do="start", rank=rank, command=command, environment=dict(environment), cwd=os.getcwd(), log=str(log))

    def events(self, timeout: float) -> list[dict[str, Any]]:
        """Events since the last call, waiting up to `timeout` seconds for the first. Raises ServerLost."""
        events: list[dict[str, Any]] = []
        while select.select([self._socket], [], [], 0 if events else timeout)[0]:
            try:
                packet = self._socket.recv(PACKET_BYTES)
            except ConnectionResetError:
                packet = b""
            if not packet:
                raise ServerLost(self._loss())
            event = json.loads(packet)
            if event["event"] == "ready":
                self._ready = True
            elif event["event"] == "started":
                self._pids[event["rank"]] = event["pid"]
            events.append(event)
        return events

    def terminate(self) -> None:
        """Send SIGTERM to the process group of every rank."""
        self._send(do="terminate")

    def sweep(self) -> list[int]:
        """End everything the ranks started; returns the processes that even SIGKILL did not end. Raises ServerLost."""
        if not self._ready:  # still importing: no rank exists yet, and none will
            self.close()
            return []
        self._send(do="sweep")
        give_up = time.monotonic() + SWEEP_SECONDS + 5
        while time.monotonic() < give_up:
            for event in self.events(timeout=0.5):
                if event["event"] == "swept":
                    self._pids.clear()
                    return list(event["left"])
        self.close()
        raise ServerLost("the fork server stopped answering and was killed")

    @property
    def pids(self) -> dict[int, int]:
        """Process of each rank that was started and not ended by `sweep`; one that exited is among them."""
        return dict(self._pids)

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    @property
    def ended(self) -> bool:
        """Whether its process has ended without an order, and `close` is still to be called."""
        return not self.closed and self._process.poll() is not None

    def close(self) -> None:
        """End the server and every rank. Idempotent."""
        self._socket.close()  # the server sweeps when it reads this, and exits
        try:
            self._process.wait(SWEEP_SECONDS + 5 if self._ready else 0.1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # When the server died by itself, the kernel has ended the ranks but not the ranks' own children.
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._pids.clear()
        self._output.close()
        self._held.close()

    def _send(self, **order: Any) -> None:
        try:
            self._socket.send(json.dumps(order).encode())
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ServerLost(self._loss()) from error

    def _loss(self) -> str:
        code = self._process.wait()
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return f"the fork server {how}" + (f": {lines[-1]}" if lines else "")


def _own_directory(held: contextlib.ExitStack) -> str:
    """Make a directory in the temporary folder, which is removed and free again when `held` closes."""
    _remove_left()
    while True:
        with contextlib.ExitStack() as own:
            path = own.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True))
            with contextlib.suppress(FileNotFoundError):  # another run took it for one that was left
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
                own.callback(os.close, descriptor)
                # False: that run has it now, and removes it. None: a file system without locks, where none is removed.
                if try_lock(descriptor) is not False and os.path.exists(path):
                    held.push(own.pop_all())
                    return path


def _remove_left() -> None:
    """Remove directories of servers that were killed together with their supervisor, so that neither could.

    One that a supervisor uses is locked; a server that outlives its supervisor for a moment names it in its command
    line. Those of other users stay.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            held.callback(os.close, descriptor)
            if os.fstat(descriptor).st_uid != os.geteuid() or not try_lock(descriptor):
                continue
            if not any(os.fsencode(path) in words for _, words in of_all_processes("cmdline")):
                shutil.rmtree(path, ignore_errors=True)


def with_project(python_path: str) -> str:
    """PYTHONPATH on which our packages are found also when they run from a checkout that is not installed."""
    return os.pathsep.join(part for part in (python_path, str(PROJECT_ROOT)) if part)
