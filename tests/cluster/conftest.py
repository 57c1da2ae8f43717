"""A real sshd on loopback, and a machine whose nvidia-smi replays what a real one printed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.loopback_sshd import LoopbackSshd, find_sshd, free_port, make_key, wait_until_open


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackSshd]:
    """One server for the session, on 127.0.0.1 and 127.0.0.2; it is ended by its own process id."""
    program, reason = find_sshd()
    if program is None:
        pytest.skip(reason)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd's privilege separation insists on it
    folder = tmp_path_factory.mktemp("sshd")
    host_key = make_key(folder / "host_key")
    client_key = make_key(folder / "client_key")
    (folder / "authorized_keys").write_text(client_key + "\n")
    port = free_port()
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nListenAddress 127.0.0.2\n"
        f"HostKey {folder}/host_key\nPidFile none\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        "PermitRootLogin prohibit-password\n"
    )
    known_hosts = folder / "known_hosts"
    known_hosts.write_text("".join(f"[127.0.0.{last}]:{port} {host_key}\n" for last in (1, 2)))
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([program, "-D", "-e", "-f", str(folder / "sshd_config")], stdout=log, stderr=log)
    try:
        wait_until_open(port, process, folder / "log")
        yield LoopbackSshd(port=port, key=folder / "client_key", host_key=host_key, known_hosts=known_hosts)
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def roomy_site(tmp_path: Path) -> Path:
    """A site no machine is too full for, so that a test's result depends on what it tests alone."""
    path = tmp_path / "roomy.yaml"
    path.write_text(
        "host_memory: {warn_percent: 100}\ndisks: [{path: /, warn_percent: 100, fail_percent: 100}]\n"
        "gpu_memory: {one_gpu_mib: 1000000, all_gpus_mib: 8000000}\n"
    )
    return path


@pytest.fixture
def install_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts an nvidia-smi with this shell body first on PATH; returns a folder it may keep state in ($STATE)."""

    def install(body: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nSTATE={tmp_path}\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return tmp_path

    return install
