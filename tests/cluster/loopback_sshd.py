"""A real sshd on loopback: keys of its own, and what a client needs to know."""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hosts.debian import find_or_install
from tests.patience import AMPLE, wait_until

ADDRESSES_OF_ONE = 16  # as many sockets as an sshd listens on; more addresses take more of them


@dataclass(frozen=True)
class LoopbackSshd:
    """A running server: what a client needs to know of it."""

    port: int
    key: Path  # private key it lets in
    host_key: str  # "ssh-ed25519 AAAA..."
    known_hosts: Path  # names every address it listens on
    log: Path  # one line "Accepted publickey" for each login

    def logins(self) -> int:
        return self.log.read_text().count("Accepted publickey")

    def target(self, address: str = "127.0.0.1") -> str:
        return f"{getpass.getuser()}@{address}:{self.port}"

    def arguments(self) -> list[str]:
        return ["--key", str(self.key), "--known-hosts", str(self.known_hosts)]


def make_key(path: Path) -> str:
    """A new key pair without passphrase; returns the public half as type and base64."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)
    return " ".join(path.with_suffix(".pub").read_text().split()[:2])


def free_port() -> int:
    """A port at which nothing listens, outside the kernel's range of ephemeral ports.

    The kernel may give a port of that range to another program before the caller uses it.
    """
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(15000, 32000)))
            return int(probe.getsockname()[1])


def wait_until_open(address: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    def open_now() -> bool:
        assert process.poll() is None, f"sshd ended with {process.returncode}: {log.read_text()}"
        try:
            with socket.create_connection((address, port)):
                return True
        except OSError:
            return False

    wait_until(open_now, f"sshd does not listen on {address} port {port}")


@contextmanager
def running_sshd(
    folder: Path, *, addresses: Sequence[str] = ("127.0.0.1", "127.0.0.2"), options: str = ""
) -> Iterator[LoopbackSshd]:
    """A server of its own with keys of its own in `folder`; skips where there is no sshd. Ended by its process id.

    It shows the same keys on all addresses, however many.
    """
    program, reason = find_or_install("sshd", "openssh-server")
    if program is None:
        pytest.skip(reason)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's privilege separation insists on it
    host_key = make_key(folder / "host_key")
    client_key = make_key(folder / "client_key")
    (folder / "authorized_keys").write_text(client_key + "\n")
    (folder / "home").mkdir()
    port = free_port()
    (folder / "sshd_config").write_text(
        f"Port {port}\nHostKey {folder}/host_key\n"
        f"PidFile none\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        "PermitRootLogin prohibit-password\nMaxStartups 500\n"
        # bash reads ~/.bashrc when sshd starts it, and what a developer has there can take longer than the test.
        f"SetEnv HOME={folder}/home\n{options}"
    )
    known_hosts, log = folder / "known_hosts", folder / "log"
    known_hosts.write_text("".join(f"[{address}]:{port} {host_key}\n" for address in addresses))
    processes = []
    try:
        with open(log, "ab") as stream:
            for start in range(0, len(addresses), ADDRESSES_OF_ONE):
                mine = [f"-oListenAddress={address}" for address in addresses[start : start + ADDRESSES_OF_ONE]]
                command = [program, "-D", "-e", "-f", str(folder / "sshd_config"), *mine]
                processes.append(subprocess.Popen(command, stdout=stream, stderr=stream))
        for process, address in zip(processes, addresses[::ADDRESSES_OF_ONE], strict=True):
            wait_until_open(address, port, process, log)
        yield LoopbackSshd(port=port, key=folder / "client_key", host_key=host_key, known_hosts=known_hosts, log=log)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(AMPLE)
