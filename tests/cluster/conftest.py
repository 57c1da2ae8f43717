"""A real sshd on loopback, engines that keep images as files, an nvidia-smi that replays what a real one printed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.fake_docker import FakeDocker, install_fake_docker, node_with_docker
from tests.cluster.loopback_sshd import LoopbackSshd, running_sshd
from tests.programs import shell_program


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackSshd]:
    """One server for the session, on 127.0.0.1 and 127.0.0.2."""
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[tuple[LoopbackSshd, FakeDocker], ...]]:
    """Two nodes with an engine each."""
    with (
        node_with_docker(tmp_path_factory.mktemp("one")) as one,
        node_with_docker(tmp_path_factory.mktemp("two")) as two,
    ):
        yield one, two


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    """The engine of this machine."""
    fake = install_fake_docker(tmp_path / "docker")
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    return fake


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
        shell_program(folder / "nvidia-smi", f"STATE={tmp_path}\n{body}")
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return tmp_path

    return install
