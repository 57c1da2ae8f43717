"""The part of `burst cluster` that runs on a node: sent there through standard input, with a request behind it.

Standard library only, and no import of ours: the node's checkout may be another one, which `facts` finds out. Each
action takes the request's fields and returns the answer, which is sent back as one line of JSON.

Three things together say that a process is ours, because none alone is enough: a variable in its environment (a
program that writes a title may overwrite it), its number with its start time (a number alone is given out again), and
its session, which `start` makes and which holds as long as one process of it lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

MARK = "BURST_RAY_NODE"  # names cluster and node in the environment of everything started there
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


def facts(
    *, candidates: list[str], toward: str, interface: str | None, describe: list[str], folder: str, ports: int
) -> dict[str, Any]:
    """Versions, the address to give to Ray, `ports` free ports, and the output of the program `describe`.

    The address is that of `interface`, else the first of `candidates` that this node has, else the one from which it
    would reach `toward`. `login_address` is the one at which sshd accepted this login, where it is an IPv4 address.
    """
    addresses = _addresses()
    address = addresses.get(interface or "") or next((ip for ip in candidates if ip in addresses.values()), "")
    if not address and toward and not interface:
        address = _source_address(toward)
    described = subprocess.run(
        [sys.executable, *describe],
        cwd=folder if os.path.isdir(folder) else "/",
        env={**os.environ, "PYTHONPATH": folder, "PATH": search_path(os.environ.get("PATH", ""))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return {
        "hostname": socket.gethostname(),
        "address": address,
        "login_address": _login_address(addresses),
        "interface": next((name for name, ip in addresses.items() if ip == address), ""),
        "interfaces": addresses,
        "free_ports": _free_ports(ports),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in ("ray", "torch")},
        },
        "description": described.stdout.strip() if described.returncode == 0 else "",
        "description_problem": "" if described.returncode == 0 else _last_line(described.stderr),
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
    """Run `command` in a session of its own and say which processes it left; `token` goes to a file only we can read.

    Refuses where one of `ports`, by the name of its setting, is in use, because Ray itself fails later and does not
    name it; and where `reach`, the head's address:port, accepts no connection from here, for which Ray waits a minute.
    An error comes with the end of Ray's logs in `log`.
    """
    if taken := [f"{name} {port}" for name, port in (ports or {}).items() if not _is_free(port)]:
        return {"error": f"{', '.join(taken)} is in use there; set another in the site's ray section, or 0 for any"}
    if reach and (why := _no_connection(reach)):
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
    log = Path(directory, LOG)
    with open(log, "wb") as output:
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
    if code != 0:
        said = log.read_text(encoding="utf-8", errors="replace")
        kept = _logs(directory)
        stop(mark=mark, directory=directory, session=process.pid, processes=[])
        how = f"exited with {code}" if code is not None else f"was not ready within {wait_seconds:g} s"
        return {"error": f"ray start {how}: {cause(said)}", "log": kept}
    return {"session": process.pid, "processes": _described(_ours(mark, process.pid, []))}


def status(*, mark: str, session: int, processes: list[dict[str, str]]) -> dict[str, Any]:
    """Which of our processes live."""
    alive = _ours(mark, session, processes)
    names = sorted(_name(pid) for pid in alive)
    return {"processes": len(alive), "raylet": "raylet" in names, "names": names}


def stop(*, mark: str, directory: str, session: int, processes: list[dict[str, str]]) -> dict[str, Any]:
    """End our processes, TERM before KILL, and remove our directory; returns how many ended and which did not."""
    began = time.monotonic()
    seen: set[int] = set()
    number = signal.SIGTERM
    while alive := _ours(mark, session, processes):
        waited = time.monotonic() - began
        if waited > _GIVE_UP_SECONDS:
            return {"ended": len(seen - set(alive)), "left": sorted(alive)}
        if waited > _KILL_AFTER_SECONDS:
            number = signal.SIGKILL
        for pid in alive - seen if number == signal.SIGTERM else alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        seen |= alive
        time.sleep(0.05)
    if directory and os.path.isfile(os.path.join(directory, "token")):  # `start` wrote it: the directory is ours
        shutil.rmtree(directory, ignore_errors=True)
    return {"ended": len(seen), "left": []}


ACTIONS = {action.__name__: action for action in (facts, start, status, stop)}


def main(request: str) -> None:
    """Carry out one request and print its answer."""
    fields = json.loads(request)
    action = ACTIONS[fields.pop("action")]
    try:
        answer = action(**fields)
    except OSError as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(REPLY + json.dumps(answer), flush=True)


def _ours(mark: str, session: int, processes: list[dict[str, str]]) -> set[int]:
    """Living processes that `start` with this mark left, without this one."""
    marked = {pid for pid in _all_pids() if _has_mark(pid, mark)}
    known = {int(process["pid"]) for process in processes if _started(int(process["pid"])) == process["started"]}
    proof = marked | known
    # The session's number means ours only while a process that is surely ours is in it.
    sessions = {_session(pid) for pid in proof} & {session}
    members = {pid for pid in _all_pids() if _session(pid) in sessions} if sessions else set()
    return (proof | members) - {os.getpid()}


def _has_mark(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # ended, or another user's
        return False


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty for a process that has ended, a zombie among them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def _session(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[3]) if fields else 0


def _started(pid: int) -> str:
    """When it started, in clock ticks since boot; empty for a process that has ended."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _described(pids: set[int]) -> list[dict[str, str]]:
    """Numbers with start times, to be recognised by later."""
    return [{"pid": str(pid), "started": started} for pid in sorted(pids) if (started := _started(pid))]


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
    """The address this node would send from to reach `toward`; empty without a route. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((toward, 9))
        return str(probe.getsockname()[0])
    return ""


def _free_ports(count: int) -> list[int]:
    """Different ports that nothing uses at this moment."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


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


def _no_connection(reach: str) -> str:
    """Why no connection to `reach`, address:port, was accepted within REACH_SECONDS; empty when one was."""
    address, _, port = reach.rpartition(":")
    ends_at = time.monotonic() + REACH_SECONDS
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
# Ray's own forms: "2026-11-22 05:57:56,007\tERR utils.py:1281 -- text", "[2026-11-22 05:57:02,368 W 1 1] f.h:1: text".
_PYTHON_LINE = re.compile(r"\d{4}-\d\d-\d\d \S+\s+(?P<level>[A-Z]+) \S+ -- (?P<text>.*)")
_NATIVE_LINE = re.compile(r"\[\d{4}-\d\d-\d\d \S+ (?P<level>[A-Z]) [^\]]*\] (?:\([^)]*\) )?\S+: (?P<text>.*)")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Timeout\w*)\b.*")


def cause(text: str) -> str:
    """The line that says why `ray start` failed: the last exception, else the first error, else the last warning, else
    the last line. What Ray prints after its exception is advice."""
    lines = [line.rstrip() for line in _COLOR.sub("", text).splitlines() if line.strip()]
    raised = [
        line
        for number, line in enumerate(lines)
        if _EXCEPTION.fullmatch(line) and any(above.startswith("Traceback") for above in lines[:number])
    ]
    found = [match for line in lines if (match := _PYTHON_LINE.match(line) or _NATIVE_LINE.match(line))]
    errors = [match["text"] for match in found if match["level"] in ("ERR", "ERROR", "PANIC", "E", "C", "F")]
    warnings = [match["text"] for match in found if match["level"] in ("WARN", "W")]
    chosen = raised[-1:] or errors[:1] or warnings[-1:] or lines[-1:] or ["it printed nothing"]
    return chosen[0].strip()[:300]


def _logs(directory: str) -> str:
    """The end of what `ray start` and the processes it had started by then have logged."""
    daemons = Path(directory, "ray", "session_latest", "logs")
    parts = []
    for path in (Path(directory, LOG), *(daemons / name for name in _DAEMON_LOGS)):
        with contextlib.suppress(OSError):
            text = _COLOR.sub("", path.read_bytes()[-_LOG_BYTES:].decode("utf-8", errors="replace"))
            parts.append(f"==> {path.name} <==\n{text}")
    return "\n".join(parts)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in _COLOR.sub("", text).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
