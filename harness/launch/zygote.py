"""The fork server's own process: imports torch once, then forks every rank of every trial from that state.

A rank is as fresh as one started by a shell (own session, own log, own environment), except that its imports are
already done: on two cores that turns seconds per rank into milliseconds. Commands that are not `python -m MODULE` are
forked and executed, so that all ranks, ours or foreign, are started and ended in one way.

No process outlives this one. It adopts orphans (child subreaper): it ends the process group of every rank
and then all children that are left, also grandchildren that made sessions of their own. It does so by order, when the
control socket closes because the supervisor died, and at SIGTERM; should it be killed itself, the kernel kills the
ranks (parent-death signal). While it imports it reads no socket, and the kernel ends it with the supervisor. Without a
supervisor it removes the directory of what ranks share by name, last.

Run by `harness.launch.forkserver` as `python -m harness.launch.zygote FD PRELOAD DIRECTORY`. One JSON message per
packet:
in  {"do": "start", "rank", "command", "environment", "cwd", "log"}, {"do": "terminate"}, {"do": "sweep"}
out {"event": "ready", "hazard"}, {"event": "started", "rank", "pid"}, {"event": "exited", "rank", "returncode", "at"},
    {"event": "swept", "left"}
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.launch.launcher import is_module_command

PACKET_BYTES = 1 << 18
SWEEP_SECONDS = 20.0  # a process stuck in a driver call dies late; longer than this is reported, not waited for

# From <linux/prctl.h>; Python offers neither.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Preload, serve, and in each forked child become the rank it was forked for."""
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to all processes; the supervisor ends the ranks
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if control in select.select([control], [], [], 0)[0] and not control.recv(1, socket.MSG_PEEK):
        return  # the supervisor died before the line above took effect
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    hazard = _preload(json.loads(sys.argv[2])) or fork_hazard()
    prctl(PR_SET_PDEATHSIG, 0)  # from here on the closed socket ends it, and the ranks' children too
    gc.freeze()  # keeps the collector from writing to, and so copying, the pages shared with the ranks
    order = Zygote(control, hazard, sys.argv[3]).serve()
    if order is not None:  # in a child, at the bottom of its stack, so that it ends as any Python program does
        become(order, execute=bool(hazard) or not is_module_command(order["command"]))


class Zygote:
    """Starts ranks, reports how each exits, and ends them."""

    def __init__(self, control: socket.socket, hazard: str, directory: str) -> None:
        self.control = control
        self.hazard = hazard  # why forked children could not go on in Python; empty when they can
        self.directory = directory  # of the supervisor, to be removed when this one is gone
        self.pids: dict[int, int] = {}  # rank -> process, which leads a process group of the same number
        self.running: set[int] = set()  # ranks not yet reported as exited

    def serve(self) -> dict[str, Any] | None:
        """Serve until the supervisor is gone; returns None then, and in a forked child the order it must carry out."""
        # A signal handler in Python only runs between bytecodes, so signals arrive as bytes that `select` sees.
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C

        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            self._send(event="ready", hazard=self.hazard)
            orphaned = False
            while not orphaned:
                ready = {key.fileobj for key, _ in selector.select()}
                if wake_read in ready and signal.SIGTERM in os.read(wake_read, 4096):
                    break
                self._report_exits()
                if self.control not in ready:
                    continue
                packet = self._receive()
                if not packet:
                    orphaned = True
                    continue
                order = json.loads(packet)
                if order["do"] == "start":
                    if self._fork(order):
                        for descriptor in (wake_read, wake_write):
                            os.close(descriptor)
                        self.control.close()
                        return dict(order)
                elif order["do"] == "terminate":
                    self._terminate()
                else:
                    assert order["do"] == "sweep", order
                    self._send(event="swept", left=self._sweep())
        self._sweep()
        if orphaned:
            shutil.rmtree(self.directory, ignore_errors=True)
        return None

    def _fork(self, order: dict[str, Any]) -> bool:
        """Fork one rank; True in the child."""
        zygote = os.getpid()
        # A SIGTERM right after the fork waits until the child has its own handlers: ours would swallow it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != zygote:  # it died before the line above took effect
                os._exit(1)
            return True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        self.pids[order["rank"]] = pid
        self.running.add(order["rank"])
        self._send(event="started", rank=order["rank"], pid=pid)
        return False

    def _report_exits(self) -> None:
        for rank in sorted(self.running):
            # WNOWAIT leaves the zombie in place: until the sweep its number can mean no other process or group.
            state = os.waitid(os.P_PID, self.pids[rank], os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if state is not None:
                code = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
                self.running.discard(rank)
                self._send(event="exited", rank=rank, returncode=code, at=time.time())

    def _terminate(self) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                try:
                    os.killpg(pid, signal.SIGTERM)
                except ProcessLookupError:  # it was forked a moment ago and leads no group yet
                    os.kill(pid, signal.SIGTERM)

    def _sweep(self) -> list[int]:
        """Kill and reap all descendants; returns the processes that did not end in time."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.pids.clear()
        self.running.clear()
        give_up = time.monotonic() + SWEEP_SECONDS
        while True:
            children = _children()
            for pid in children:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:  # none left
                return []
            if time.monotonic() > give_up:
                return children
            time.sleep(0.01)

    def _receive(self) -> bytes:
        try:
            return self.control.recv(PACKET_BYTES)
        except ConnectionResetError:  # the supervisor died with messages of ours unread
            return b""

    def _send(self, **event: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `serve` reads the closed socket next
            self.control.send(json.dumps(event).encode())


def become(order: dict[str, Any], *, execute: bool) -> None:
    """Make this forked child the ordered rank: its log, directory, environment, then its program."""
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(log)
    os.close(null)
    # When memory runs out the kernel should end a rank, not the program that records how it ended.
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    os.chdir(order["cwd"])
    os.environ.update(order["environment"])
    command: list[str] = order["command"]
    if execute:
        try:
            os.execvp(command[0], command)  # noqa: S606 - an argument list; no shell takes part
        except OSError as error:
            sys.exit(f"{command[0]} cannot be executed ({error.strerror}); check that it is installed on this machine")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    module, arguments = command[2], command[3:]
    sys.modules.pop(module, None)  # preloaded for its imports; as __main__ it is executed anew
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def fork_hazard() -> str:
    """Why a forked child could not safely go on in Python: threads or a CUDA driver state, neither of which survives
    a fork. Empty when it can."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"the preloaded modules started {threads - 1} threads"
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            if os.readlink(descriptor).startswith("/dev/nvidia-uvm"):
                return "the preloaded modules initialised CUDA"
    return ""


def _preload(modules: list[str]) -> str:
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - the rank, executed instead of forked, raises it again and logs it in full
            return f"{name} cannot be imported: {type(error).__name__}: {error}"
    return ""


def of_all_processes(name: str) -> Iterator[tuple[int, bytes]]:
    """Number of each process and content of its /proc/PID/`name`.

    Processes that end meanwhile are left out, and those of other users whose file cannot be read. `Path.glob` would
    raise for a process that ends during the search.
    """
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                content = Path("/proc", entry, name).read_bytes()
            except OSError:
                continue
            yield int(entry), content


def fields_of(stat: bytes) -> list[str]:
    """Fields of a /proc/PID/stat from the state on; the parent follows it."""
    # The name in field 2 may hold spaces and brackets; the state follows its last bracket.
    return stat.decode(errors="replace").rpartition(")")[2].split()


def _children() -> list[int]:
    """Direct children, adopted ones included."""
    own, found = os.getpid(), []
    for pid, stat in of_all_processes("stat"):
        fields = fields_of(stat)
        if len(fields) > 1 and int(fields[1]) == own:
            found.append(pid)
    return found


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed; ranks are started on Linux only")


if __name__ == "__main__":
    main()
