"""Shared storage is really written and read here; docker's answers are written by us after its documented formats."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.checks.host import shared_memory
from cluster.checks.software import docker
from cluster.checks.storage import shared_storage
from cluster.inventory.site import Container, SharedPath, Site, Storage
from cluster.probing.probe import Output
from cluster.probing.verdict import Verdict
from cluster.transport.reach import LocalRunner
from tests.cluster.gpu_outputs import EIGHT, NO_GPUS, board
from tests.patience import AMPLE
from tests.programs import shell_program


def try_storage(*paths: SharedPath) -> Verdict:
    site = Site(storage=Storage(shared=paths))
    done = LocalRunner().run(["sh", "-c", shared_storage.probe(site).script], deadline_seconds=AMPLE)
    return shared_storage.judge(Output(text=done.stdout), site)


def test_a_shared_path_is_written_read_and_left_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "two words; $HOME"
    folder.mkdir()
    verdict = try_storage(SharedPath(path=str(folder)))
    assert (verdict.level, verdict.summary) == ("ok", f"{folder} can be written and read")
    assert list(folder.iterdir()) == []


def test_an_absent_path_fails_and_the_others_are_still_tried(tmp_path: Path) -> None:
    verdict = try_storage(SharedPath(path=str(tmp_path / "none")), SharedPath(path=str(tmp_path)))
    assert (verdict.level, verdict.action) == ("fail", "isolate")
    assert verdict.summary == f"{tmp_path}/none is absent; mount it"


def test_a_path_that_cannot_be_written_fails_unless_reading_is_enough() -> None:
    assert try_storage(SharedPath(path="/proc")).level == "fail"
    assert try_storage(SharedPath(path="/proc", write=False)).level == "ok"


def test_a_full_path_fails_below_the_free_space_the_site_requires(tmp_path: Path) -> None:
    verdict = try_storage(SharedPath(path=str(tmp_path), min_free_gib=1e6))
    assert verdict.level == "fail"
    assert "requires 1e+06 GiB" in verdict.summary


def test_a_hanging_server_costs_its_own_time_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, hangs, well = tmp_path / "bin", tmp_path / "hangs", tmp_path / "well"
    for folder in (programs, hangs, well):
        folder.mkdir()
    shell_program(programs / "cat", f'case $1 in {hangs}/*) sleep 60 ;; esac\nexec /bin/cat "$@"')
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    verdict = try_storage(SharedPath(path=str(hangs), probe_seconds=1), SharedPath(path=str(well)))
    assert verdict.level == "fail"
    assert verdict.summary.startswith(f"{hangs} hangs for more than 1 s")
    assert list(hangs.iterdir()) == list(well.iterdir()) == []


def test_a_path_that_was_not_tried_is_unknown() -> None:
    site = Site(storage=Storage(shared=(SharedPath(path="/data"),)))
    assert shared_storage.judge(Output(text="end"), site).level == "unknown"
    assert shared_storage.judge(Output(text="path 0 137 "), site).level == "fail"


def test_a_site_without_shared_storage_has_nothing_to_try() -> None:
    assert try_storage().level == "ok"


IMAGE_ID = "sha256:" + "3f" * 32
DOCKED = Site(gpus=EIGHT.gpus, container=Container(engine="docker", image="registry.lab/burst:2.1", image_id=IMAGE_ID))
HEALTHY = f"engine 28.2.2\nruntimes io.containerd.runc.v2 nvidia runc \ntoolkit yes\nimage {IMAGE_ID}"


@pytest.mark.parametrize(
    ("text", "level", "words"),
    [
        (HEALTHY, "ok", "docker 28.2.2 has registry.lab/burst:2.1"),
        (HEALTHY.replace(" nvidia", ""), "ok", ""),
        (HEALTHY.replace("toolkit yes", "toolkit no"), "ok", ""),
        (HEALTHY.replace(" nvidia", "").replace("yes", "no"), "fail", "install nvidia-container-toolkit"),
        (HEALTHY.replace(IMAGE_ID, ""), "fail", "burst image push"),
        (HEALTHY.replace("3f3f", "4e4e", 1), "fail", "expected sha256:3f3f"),
        ("absent", "fail", "not installed"),
        ("Cannot connect to the Docker daemon\nrefused 1", "fail", "Cannot connect to the Docker daemon"),
        ("permission denied\nrefused 1", "fail", "group docker"),
        ("Segmentation fault", "unknown", "something else"),
    ],
)
def test_docker_is_judged_where_the_site_uses_it(text: str, level: str, words: str) -> None:
    verdict = docker.judge(Output(text=text), DOCKED, board("h200"))
    assert verdict.level == level
    assert words in verdict.summary


def test_docker_without_gpus_needs_no_toolkit() -> None:
    site = Site(container=Container(engine="docker", image="burst"))
    text = HEALTHY.replace(" nvidia", "").replace("yes", "no")
    assert docker.judge(Output(text=text), site, NO_GPUS).level == "ok"
    assert docker.judge(Output(text=text), site, board("h200")).level == "fail"


def test_a_site_without_docker_never_asks_for_it() -> None:
    assert docker.probe(Site()).script == "echo unused"
    assert docker.judge(Output(text="unused"), Site(), board("h200")).level == "ok"


@pytest.mark.parametrize("running", [True, False])
def test_the_docker_probe_reads_a_real_command_line(
    running: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = (
        'case $1 in info) printf "engine 28.2.2\\nruntimes nvidia runc \\n" ;; '
        f'image) [ "$6" = registry.lab/burst:2.1 ] && echo {IMAGE_ID} ;; esac'
    )
    shell_program(tmp_path / "docker", answer if running else "echo no daemon >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = LocalRunner().run(["sh", "-c", docker.probe(DOCKED).script], deadline_seconds=AMPLE)
    verdict = docker.judge(Output(text=done.stdout), DOCKED, board("h200"))
    assert (verdict.level, "no daemon" in verdict.summary) == (("ok", False) if running else ("fail", True))


def shm(free_kib: int) -> Output:
    header = "Filesystem     1024-blocks  Used Available Capacity Mounted on"
    return Output(text=f"{header}\ntmpfs  {free_kib + 5} 5 {free_kib}  1% /dev/shm")


def test_shared_memory_is_a_gibibyte_for_each_gpu() -> None:
    assert shared_memory.judge(shm(8 * 2**20), EIGHT, board("h200")).level == "ok"
    verdict = shared_memory.judge(shm(8 * 2**20 - 1), EIGHT, board("h200"))
    assert (verdict.level, "--ipc=host" in verdict.summary) == ("warn", True)
    assert shared_memory.judge(shm(64 * 1024), Site(), NO_GPUS).level == "ok"
    assert shared_memory.judge(shm(126 * 2**20), Site(), NO_GPUS).summary == "/dev/shm has 126 GiB left"
