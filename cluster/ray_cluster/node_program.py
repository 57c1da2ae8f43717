"""The part of `burst cluster` that runs on a node: sent there through standard input, with a request behind it.

Standard library only, and no import of ours: the node's checkout may be another one. Each action takes the request's
fields and returns the answer, which is sent back as one line of JSON.

A process is ours by a variable in its environment, which its children inherit; so are the others of its session, which
`start` makes: a child may have been given another environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

MARK = "BURST_RAY_NODE"  # names launching machine and node in the environment of everything started there
# Values of the node's login under other names: Ray sets its own CUDA_VISIBLE_DEVICES for its workers, and gives them no
# LD_PRELOAD.
KEPT = {"CUDA_VISIBLE_DEVICES": "BURST_CUDA_VISIBLE_DEVICES", "LD_PRELOAD": "BURST_LD_PRELOAD"}
# A command over SSH gets a short PATH; nvidia-smi lives in one of these.
FOLDERS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/nvidia/bin")
REPLY = "burst-node-reply "  # begins the line that holds the answer: a login shell may print a banner before it
LOG = "ray-start.log"
_DAEMON_LOGS = ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err")  # of Ray's latest session
_LOG_BYTES = 32768  # of the end of each log of a start that failed
REACH_SECONDS = 10.0  # for the head to accept a connection from another node
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>: an interface's IPv4 address
_KILL_AFTER_SECONDS = 3.0
_GIVE_UP_SECONDS = 20.0  # a process stuck in a driver call dies late; longer is reported, not waited for


def facts(*, toward: str, dashboard: bool) -> dict[str, Any]:
    """The node's IPv4 addresses by interface; that at which sshd accepted this login; that from which it would reach
    `toward`; a free port; and whether Ray's `dashboard` could start, where that is asked."""
    addresses = _addresses()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    able = True
    if dashboard:
        try:
            importlib.import_module("ray.dashboard.optional_deps")  # as Ray itself finds out
        except ImportError:
            able = False
    return {
        "interfaces": addresses,
        "login_address": _login_address(addresses),
        "source_address": _source_address(toward),
        "free_port": port,
        "dashboard": able,
    }


def start(
    *,
    mark: str,
    directory: str,
    token: str,
    command: list[str],
    environment: dict[str, str],
    wait_seconds: float,
    ports: dict[str, int] | None = None,
    reach: str = "",
) -> dict[str, Any]:
    """Run `command` in a session of its own; `token` goes to a file only we can read.

    Refuses where one of `ports`, by the name of its setting, is in use, because Ray itself fails later and does not
    name it; and where `reach`, the head's address:port, accepts no connection from here, for which Ray waits a minute.
    An error comes with the end of Ray's logs in `log`.
    """
    if taken := [f"{name} {port}" for name, port in (ports or {}).items() if not _is_free(port)]:
        return {"error": f"{', '.join(taken)} is in use there; set another in the site's ray section, or 0 for any"}
    if reach and (why := _no_connection(reach, REACH_SECONDS)):
        return {"error": f"does not reach the head at {reach} ({why}); look at the network and firewall between them"}
    os.umask(0o077)
    path = Path(directory, "token")
    try:
        Path(directory).parent.mkdir(parents=True, exist_ok=True)
        os.mkdir(directory)  # one that is there already would be another cluster's
        path.write_text(token, encoding="ascii")
    except OSError as error:
        why = f"{directory} cannot be made there ({error.strerror})"
        return {"error": f"{why}; give ray.temp_dir a folder with room that the user may write to"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    inherited |= {other: inherited[name] for name, other in KEPT.items() if name in inherited}
    inherited["PATH"] = search_path(os.environ.get("PATH", ""))
    with open(Path(directory, LOG), "wb") as output:
        process = subprocess.Popen(
            command,
            env={**inherited, **environment, MARK: mark, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(wait_seconds)
        except subprocess.TimeoutExpired:
            code = None
    if code == 0:
        return {}
    kept = _logs(directory)
    stop(mark=mark, directory=directory)
    how = (
        f"ended with exit code {code} as it started" if code is not None else f"was not ready within {wait_seconds:g} s"
    )
    return {"error": f"Ray {how}", "log": kept}


def status(*, mark: str, head: str) -> dict[str, Any]:
    """How many of our processes live, Ray's own among them, and whether the head at address:port accepts a connection
    from here."""
    alive = _ours(mark)
    names = {_name(pid) for pid in alive}
    return {
        "processes": len(alive),
        "raylet": "raylet" in names,
        "gcs": "gcs_server" in names,
        "reaches_head": not _no_connection(head, 1.0),
    }


def stop(*, mark: str, directory: str) -> dict[str, Any]:
    """End our processes, TERM before KILL, and remove our directory; returns how many ended, and `left`: the processes
    and the directory that stayed."""
    began = time.monotonic()
    seen: set[int] = set()
    number = signal.SIGTERM
    while alive := _ours(mark):
        waited = time.monotonic() - began
        if waited > _GIVE_UP_SECONDS:
            return {"ended": len(seen - alive), "left": [f"process {pid}" for pid in sorted(alive)]}
        if waited > _KILL_AFTER_SECONDS:
            number = signal.SIGKILL
        for pid in alive - seen if number == signal.SIGTERM else alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        seen |= alive
        time.sleep(0.05)
    if os.path.isfile(os.path.join(directory, "token")):  # `start` wrote it: the directory is ours
        shutil.rmtree(directory, ignore_errors=True)
        if os.path.exists(directory):
            return {"ended": len(seen), "left": [directory]}
    return {"ended": len(seen), "left": []}


ACTIONS = {action.__name__: action for action in (facts, start, status, stop)}


def main(request: str) -> None:
    """Carry out one request and print its answer."""
    fields = json.loads(request)
    action = ACTIONS[fields.pop("action")]
    try:
        answer = action(**fields)
    except OSError as error:
        answer = {"error": f"{error.filename or 'the node'}: {error.strerror}; look at its file system"}
    print(REPLY + json.dumps(answer), flush=True)


def _ours(mark: str) -> set[int]:
    """Living processes of ours with this mark, without this one."""
    marked = {pid for pid in _all_pids() if _has_mark(pid, mark)} - {os.getpid()}
    # 0: of a process of another namespace. This program's own session also has the login shell.
    sessions = {_session(pid) for pid in marked} - {0, _session(os.getpid())}
    return marked | {pid for pid in _all_pids() if _session(pid) in sessions}


def _has_mark(pid: int, mark: str) -> bool:
    try:
        found = f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # ended, or another user's
        return False
    return found and _session(pid) != 0


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session(pid: int) -> int:
    """0 for a process that has ended, a zombie among them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[3])


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _addresses() -> dict[str, str]:
    """IPv4 address of each interface that has one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # no IPv4 address
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(reply[20:24])
    return found


def _source_address(toward: str) -> str:
    """The address this node would send from to reach `toward`; empty without one, or a route. Nothing is sent."""
    if not toward:
        return ""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((toward, 9))
        return str(probe.getsockname()[0])
    return ""


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def search_path(path: str) -> str:
    """PATH of the node's login, then the usual folders that it lacks."""
    given = [folder for folder in path.split(":") if folder]
    return ":".join([*given, *(folder for folder in FOLDERS if folder not in given)])


def _login_address(addresses: dict[str, str]) -> str:
    """The server's side of SSH_CONNECTION: client address and port, server address and port."""
    fields = os.environ.get("SSH_CONNECTION", "").split()
    return fields[2] if len(fields) == 4 and fields[2] in addresses.values() else ""


def _no_connection(reach: str, seconds: float) -> str:
    """Why no connection to `reach`, address:port, was accepted in time; empty when one was."""
    address, _, port = reach.rpartition(":")
    ends_at = time.monotonic() + seconds
    why = ""
    while (left := ends_at - time.monotonic()) > 0:
        try:
            with socket.create_connection((address, int(port)), left):
                return ""
        except OSError as error:
            why = error.strerror or "no answer"
            time.sleep(min(0.5, left))
    return why or "no answer"


_COLOR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def _logs(directory: str) -> str:
    """The end of what `ray start` and the processes it had started by then have logged."""
    daemons = Path(directory, "ray", "session_latest", "logs")
    parts = []
    for path in (Path(directory, LOG), *(daemons / name for name in _DAEMON_LOGS)):
        with contextlib.suppress(OSError):
            text = _COLOR.sub("", path.read_bytes()[-_LOG_BYTES:].decode("utf-8", errors="replace"))
            parts.append(f"==> {path.name} <==\n{text}")
    return "\n".join(parts)
