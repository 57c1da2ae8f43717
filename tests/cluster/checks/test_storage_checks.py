"""Disks judged on df's output, the first captured on Debian 12; shared storage is really written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster.checks.storage import disk, shared_storage
from cluster.inventory.site import DiskLimit, SharedPath, Site, Storage
from cluster.probing.verdict import Level, Verdict
from tests.cluster.gpu_outputs import judge, look
from tests.programs import shell_program

HEADER = "Filesystem     1024-blocks     Used Available Capacity Mounted on"
ROOT = f"path /\n{HEADER}\n/dev/vda         106052916 24358612  81677920      23% /"
TWO = Site(disks=(DiskLimit(path="/data"), DiskLimit(path="/")))


def row(path: str, used: int, available: int, filesystem: str = "/dev/vda") -> str:
    return f"path {path}\n{HEADER}\n{filesystem} {used + available + 5} {used} {available} 50% {path}"


@pytest.mark.parametrize(
    ("text", "site", "level", "summary"),
    [
        (ROOT, Site(), "ok", "/ is 23% full, 78 GiB left"),
        (row("/", 899, 101), Site(), "ok", ""),
        (row("/", 900, 100), Site(), "warn", "/ is 90% full"),
        (row("/", 949, 51), Site(), "warn", ""),
        (row("/", 950, 50), Site(), "fail", "/ is 95% full"),
        (row("/", 1000, 0), Site(), "fail", "/ is 100% full"),
        (row("/", 1000, -7), Site(), "fail", ""),
        (row("/", 96, 4, "//nas/my share 5%"), Site(), "fail", ""),
        (f"{row('/', 1, 99)}\n{row('/data', 97, 3)}", TWO, "fail", "/data is 97% full"),
        (f"path /data\ndf: /data: No such file or directory\n{ROOT}", TWO, "fail", "/data is absent; mount it or"),
        ("path /\ndf: /: Stale file handle", Site(), "unknown", "/ cannot be read (df: /: Stale file handle)"),
    ],
)
def test_the_worst_path_is_the_verdict_and_is_named(text: str, site: Site, level: Level, summary: str) -> None:
    verdict = judge(disk, text, site)
    assert verdict.level == level
    assert verdict.summary.startswith(summary)


def test_every_path_leaves_its_numbers() -> None:
    assert set(judge(disk, f"{row('/', 1, 99)}\n{row('/data', 97, 3)}", TWO).facts) == {"/", "/data"}


def test_a_path_with_shell_characters_is_only_a_path() -> None:
    site = Site(disks=(DiskLimit(path="/no such; echo $HOME 'here'"),))
    assert disk.judge(look(disk, site), site).summary.startswith("/no such; echo $HOME 'here' is absent")


def try_storage(*paths: SharedPath) -> Verdict:
    site = Site(storage=Storage(shared=paths))
    return shared_storage.judge(look(shared_storage, site), site)


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


def test_a_hanging_server_costs_its_own_time_and_leaves_nothing_behind(tmp_path, monkeypatch):
    programs, hangs, well = tmp_path / "bin", tmp_path / "hangs", tmp_path / "well"
    for folder in (programs, hangs, well):
        folder.mkdir()
    shell_program(programs / "cat", f'case $1 in {hangs}/*) sleep 60 ;; esac\nexec /bin/cat "$@"')
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    verdict = try_storage(SharedPath(path=str(hangs), probe_seconds=1), SharedPath(path=str(well)))
    assert verdict.level == "fail"
    assert verdict.summary.startswith(f"{hangs} hangs for more than 1 s")
    assert list(hangs.iterdir()) == list(well.iterdir()) == []


def test_a_path_that_was_not_tried_is_unknown_and_a_site_without_any_has_nothing_to_try() -> None:
    site = Site(storage=Storage(shared=(SharedPath(path="/data"),)))
    assert judge(shared_storage, "end", site).level == "unknown"
    assert judge(shared_storage, "path 0 137 ", site).level == "fail"
    assert try_storage().level == "ok"
