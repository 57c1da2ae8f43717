"""Several real hosts on one Linux machine: network namespaces on a bridge, each with an sshd, address and host name.

What sets them apart is real (addresses, ports, interfaces, host names, host keys, SSH); files, memory and process
numbers are this machine's. It needs root, iproute2 and openssh-server. Everything is named after this process, so labs
side by side do not conflict, and everything is ended by what the kernel lists in a namespace.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hosts.debian import missing, path_of
from tests.patience import wait_until
from tests.processes import all_pids, content, kill

PREFIX = "bl"
SSH_PORT = 22  # of each host's own namespace
INTERFACES = (
    "eth0",
    "ens1",
    "lan2",
    "net3",
    "p4p1",
)  # another name on every host, as on machines bought in different years
_labs = itertools.count()


@dataclass(kw_only=True)
class LabHost:
    """One host. `sshd` is None while no server runs on it."""

    name: str  # its host name
    namespace: str
    address: str
    interface: str
    folder: Path  # its keys, configuration and log
    temporary: Path  # its own folder for temporary files, which no host of another lab shares; short, for sockets
    sshd: subprocess.Popen[bytes] | None = None

    @property
    def host_key(self) -> str:
        """Type and base64 of its public host key."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    def inside(self, *command: str) -> list[str]:
        """The command that runs `command` in the host's network and under its name."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$1" && shift && exec "$@"', "sh", self.name, *command]
        return [path_of("ip", "iproute2"), "netns", "exec", self.namespace, *named]


def unavailable() -> str:
    """Why there can be no lab on this machine; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root; run the tests as root"
    if reason := missing(("ip", "iproute2"), ("sshd", "openssh-server"), ("unshare", "util-linux")):
        return reason
    done = subprocess.run(["ip", "netns", "add", f"{PREFIX}{os.getpid():x}try"], capture_output=True, text=True)
    if done.returncode:
        return f"the kernel makes no network namespaces here: {done.stderr.strip()}"
    _ip("netns", "delete", f"{PREFIX}{os.getpid():x}try")
    return ""


class Lab:
    """The hosts and what can be done to them. Use `open_lab`."""

    def __init__(self, count: int, folder: Path) -> None:
        self.folder = folder
        self.tag = f"{PREFIX}{os.getpid():x}{'abcdefghijklmnopqrstuvwxyz'[next(_labs) % 26]}"
        self.key = folder / "client_key"
        self.known_hosts = folder / "known_hosts"
        subnet = _free_subnet()
        self.gateway = f"{subnet}.1"  # this machine's own address among the hosts
        self.hosts = tuple(
            LabHost(
                name=f"lab{number + 1}",
                namespace=f"{self.tag}{number}",
                address=f"{subnet}.{number + 11}",
                interface=INTERFACES[number],
                folder=folder / f"lab{number + 1}",
                temporary=Path(tempfile.mkdtemp(prefix="burst-lab-")),
            )
            for number in range(count)
        )

    def open(self) -> None:
        """Bring bridge, hosts and servers up."""
        _make_key(self.key)
        _ip("link", "add", self.tag, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", self.tag)
        _ip("link", "set", self.tag, "up")
        for host in self.hosts:
            host.folder.mkdir()
            _make_key(host.folder / "host_key")
            outside = f"{host.namespace}v"
            _ip("netns", "add", host.namespace)
            _ip("link", "add", outside, "type", "veth", "peer", "name", host.interface, "netns", host.namespace)
            _ip("link", "set", outside, "master", self.tag, "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.namespace, "link", "set", host.interface, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            self.start_sshd(host)
        self.known_hosts.write_text("".join(f"{host.address} {host.host_key}\n" for host in self.hosts))
        for host in self.hosts:
            _wait_for_ssh(host)

    def close(self) -> None:
        """End every process of every host, then remove the hosts. Goes on after a failure to open half-way."""
        for host in self.hosts:
            self.kill(host)
            _ip("link", "delete", f"{host.namespace}v", check=False)  # the kernel would do it later, at its leisure
            _ip("netns", "delete", host.namespace, check=False)
            shutil.rmtree(host.temporary, ignore_errors=True)
        _ip("link", "delete", self.tag, check=False)

    def start_sshd(self, host: LabHost) -> None:
        """Start the host's server, under the host's own name."""
        config = host.folder / "sshd_config"
        authorized = self.key.with_suffix(".pub")
        config.write_text(
            f"Port {SSH_PORT}\nListenAddress {host.address}\nHostKey {host.folder}/host_key\nPidFile none\n"
            f"AuthorizedKeysFile {authorized}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nMaxStartups 100\nUseDNS no\n"
            f"SetEnv TMPDIR={host.temporary}\n"
        )
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's privilege separation insists on it
        sshd = path_of("sshd", "openssh-server")
        with open(host.folder / "log", "ab") as log:
            host.sshd = subprocess.Popen(
                host.inside(sshd, "-D", "-e", "-f", str(config)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop_sshd(self, host: LabHost) -> None:
        """The host stays up, its port 22 is closed."""
        assert host.sshd is not None
        host.sshd.kill()
        host.sshd.wait()
        host.sshd = None

    def freeze(self, host: LabHost) -> None:
        """The host accepts connections, the kernel does that, and never says a word."""
        assert host.sshd is not None
        host.sshd.send_signal(signal.SIGSTOP)

    def thaw(self, host: LabHost) -> None:
        assert host.sshd is not None
        host.sshd.send_signal(signal.SIGCONT)

    def replace_host_key(self, host: LabHost) -> None:
        """As when another machine answers at the address."""
        self.stop_sshd(host)
        for path in (host.folder / "host_key", host.folder / "host_key.pub"):
            path.unlink()
        _make_key(host.folder / "host_key")
        self.start_sshd(host)
        _wait_for_ssh(host)

    def kill(self, host: LabHost) -> None:
        """The host is lost: all its processes die at once and its address answers nobody."""
        _ip("-n", host.namespace, "link", "set", host.interface, "down", check=False)
        while pids := self.processes(host):
            kill(pids)
            if host.sshd is not None:
                host.sshd.poll()  # reap it: a zombie still counts as a process of the namespace
            time.sleep(0.02)
        if host.sshd is not None:
            host.sshd.wait()
            host.sshd = None

    def cut(self, host: LabHost) -> None:
        """The host's link is lost: its processes go on, and no connection is closed."""
        _ip("link", "set", f"{host.namespace}v", "down")

    def mend(self, host: LabHost) -> None:
        """Its link is there again, with whatever still runs on it."""
        _ip("link", "set", f"{host.namespace}v", "up")
        _wait_for_ssh(host)

    def revive(self, host: LabHost) -> None:
        """Boot a lost host."""
        _ip("-n", host.namespace, "link", "set", host.interface, "up")
        self.start_sshd(host)
        _wait_for_ssh(host)

    def mount(self, host: LabHost, path: Path, size: str) -> None:
        """A small disk at `path`, which only this host sees; it goes with the host."""
        self.run(host, "mount", "-t", "tmpfs", "-o", f"size={size}", "lab", str(path))

    def run(self, host: LabHost, *command: str) -> str:
        """Output of a command in the host's namespaces."""
        assert host.sshd is not None
        return _run(["nsenter", "-t", str(host.sshd.pid), "-n", "-u", "-m", *command])

    def processes(self, host: LabHost) -> list[int]:
        """All processes on the host; none when it does not exist."""
        return _processes_in(host.namespace)

    def left_behind(self) -> list[str]:
        """Namespaces, interfaces and processes of this lab that still exist."""
        spaces = [line.split()[0] for line in _ip("netns", "list").stdout.splitlines() if line]
        links = re.findall(r"^\d+: ([^:@]+)", _ip("-o", "link").stdout, re.MULTILINE)
        found = [name for name in (*spaces, *links) if name.startswith(self.tag)]
        mentioning = [pid for pid in all_pids() if str(self.folder).encode() in content(pid, "cmdline")]
        return found + [f"process {pid}" for pid in mentioning if pid != os.getpid()]


@contextlib.contextmanager
def open_lab(count: int, folder: Path) -> Iterator[Lab]:
    """`count` hosts (at most five) for the block; `folder` is a new one for their files."""
    assert 1 <= count <= len(INTERFACES), count
    _remove_orphans()
    lab = Lab(count, folder)
    try:
        lab.open()
        yield lab
    finally:
        lab.close()


def _remove_orphans() -> None:
    """Labs whose test run was killed: named after a process that is gone."""
    for line in _ip("netns", "list").stdout.splitlines():
        match = re.match(rf"{PREFIX}([0-9a-f]+)[a-z]\d\b", line)
        if match and not Path(f"/proc/{int(match[1], 16)}").exists():
            kill(_processes_in(match[0]))
            _ip("netns", "delete", match[0], check=False)
            _ip("link", "delete", match[0][:-1], check=False)


def _processes_in(namespace: str) -> list[int]:
    return [int(pid) for pid in _ip("netns", "pids", namespace, check=False).stdout.split()]


def _free_subnet() -> str:
    """The first three numbers of a 10.x.y.0/24 that no interface of this machine has."""
    taken = _ip("-4", "-o", "addr").stdout
    for step in range(256):
        pid = os.getpid() + step * 257
        subnet = f"10.{64 + (pid >> 8) % 128}.{pid % 256}"
        if f" {subnet}." not in taken:
            return subnet
    raise AssertionError(f"no subnet is free:\n{taken}")


def _make_key(path: Path) -> None:
    assert shutil.which("ssh-keygen")
    _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", path])


def _wait_for_ssh(host: LabHost) -> None:
    """Until it greets: the bridge takes a moment to forward to a new port."""

    def greets() -> bool:
        assert host.sshd is not None
        assert host.sshd.poll() is None, (host.folder / "log").read_text()
        with contextlib.suppress(OSError), socket.create_connection((host.address, SSH_PORT), 2) as connection:
            connection.settimeout(5)
            return connection.recv(4) == b"SSH-"
        return False

    wait_until(greets, f"{host.name} does not answer")


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([path_of("ip", "iproute2"), *arguments], capture_output=True, text=True)
    assert not check or done.returncode == 0, (arguments, done.stderr)
    return done


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout
