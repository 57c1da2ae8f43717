"""Checkpoints fetched from hosts that do not see the launching machine's storage, here folders of this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from engine.training.manifest import checkpoints, damage, read_manifest
from harness.launch.ray.watch import HostLost
from harness.training.gathering import Gathering
from tests.engine.training.test_manifest import written


class LocalFolder:
    """A host's folder that is on this machine: the protocol's methods, on files."""

    def __init__(self, path: Path, *, first: bool) -> None:
        self.host, self.path, self.first = path.name, str(path), first
        self.lost = False
        path.mkdir(parents=True, exist_ok=True)

    def files(self) -> dict[str, int]:
        if self.lost:
            raise HostLost(self.host, "gone")
        paths = [path for path in Path(self.path).rglob("*") if path.is_file()]
        return {str(path.relative_to(self.path)): path.stat().st_size for path in paths}

    def read(self, name: str) -> Iterator[bytes]:
        yield Path(self.path, name).read_bytes()

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        path = Path(self.path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(pieces))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[LocalFolder, LocalFolder]:
    return LocalFolder(tmp_path / "lab1", first=True), LocalFolder(tmp_path / "lab2", first=False)


def gathering(tmp_path: Path, said: list[str] | None = None) -> Gathering:
    (tmp_path / "run").mkdir(exist_ok=True)
    return Gathering(tmp_path / "run", keep=2, say=(said if said is not None else []).append)


def whole(folder: Path) -> list[str]:
    return [path.name for path in checkpoints(folder) if not damage(path, read_manifest(path).files)]


def test_the_newest_checkpoint_of_any_host_is_fetched_and_as_many_stay_as_are_kept(tmp_path: Path, hosts) -> None:
    gather = gathering(tmp_path)
    for step in (2, 4, 6):
        for host in hosts:
            written(Path(host.path, "checkpoints"), step)
        gather.progressed({"step": step, "saved": step}, hosts)
        gather.end(hosts)
    assert whole(tmp_path / "run" / "checkpoints") == ["step-00000006", "step-00000004"]
    hosts[0].lost = True
    written(Path(hosts[1].path, "checkpoints"), 8)
    gather.end(hosts)
    assert whole(tmp_path / "run" / "checkpoints")[0] == "step-00000008"


def test_a_checkpoint_that_arrives_changed_is_taken_from_the_other_host(tmp_path: Path, hosts) -> None:
    for host in hosts:
        written(Path(host.path, "checkpoints"), 2)
    Path(hosts[0].path, "checkpoints", "step-00000002", "data.bin").write_bytes(b"parameterz")
    gathering(tmp_path).end(hosts)
    assert whole(tmp_path / "run" / "checkpoints") == ["step-00000002"]


def test_metrics_come_from_the_host_of_rank_0_and_no_other_file_does(tmp_path: Path, hosts) -> None:
    for host in hosts:
        Path(host.path, "metrics.jsonl").write_text(json.dumps({"kind": "step", "host": host.host}) + "\n")
    Path(hosts[0].path, "training.json").write_text("{}")
    gathering(tmp_path).end(hosts)
    assert '"lab1"' in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_a_resumed_run_sends_the_newest_whole_checkpoint_and_the_metrics_to_the_first_host(tmp_path, hosts) -> None:
    said: list[str] = []
    gather = gathering(tmp_path, said)
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    for step in (2, 4):
        written(tmp_path / "run" / "checkpoints", step)
    (tmp_path / "run" / "checkpoints" / "step-00000004" / "data.bin").write_bytes(b"parameterz")
    gather.begin(hosts, all_apart=True)
    assert whole(Path(hosts[0].path, "checkpoints")) == ["step-00000002"]
    assert Path(hosts[0].path, "metrics.jsonl").read_text() == "{}\n"
    assert [path.name for path in Path(hosts[1].path).iterdir()] == [".run-id"]
    assert (
        said[0] == f"{tmp_path / 'run'} is not seen by lab1, lab2: its checkpoints are gathered here as they are saved"
    )
    assert said[1].startswith("checkpoint step-00000004 is skipped because its file data.bin has changed")


def test_nothing_is_sent_where_some_host_sees_the_run_directory(tmp_path: Path, hosts) -> None:
    gather = gathering(tmp_path)
    written(tmp_path / "run" / "checkpoints", 2)
    gather.begin(hosts[1:], all_apart=False)
    assert [path.name for path in Path(hosts[1].path).iterdir()] == [".run-id"]


def test_what_hosts_still_have_of_a_killed_start_is_fetched_and_what_is_of_another_run_is_not(tmp_path, hosts) -> None:
    gathering(tmp_path).begin(hosts, all_apart=True)
    for host in hosts:  # the ranks save, and nothing fetches that
        written(Path(host.path, "checkpoints"), 6)
    Path(hosts[0].path, "metrics.jsonl").write_text("{}\n" * 6)
    Path(hosts[1].path, "metrics.jsonl").write_text("{}\n")  # of a start before
    said: list[str] = []
    gathering(tmp_path, said).begin((hosts[1], hosts[0]), all_apart=True)
    assert said[1:] == [
        "checkpoint step-00000006 was still on the hosts, from a start that ended before it was fetched"
    ]
    assert whole(tmp_path / "run" / "checkpoints") == ["step-00000006"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n" * 6

    (tmp_path / "run").rename(tmp_path / "earlier")  # as a run that is started anew does
    written(Path(hosts[0].path, "checkpoints"), 8)
    said.clear()
    gathering(tmp_path, said).begin(hosts, all_apart=True)
    assert len(said) == 1
    assert whole(tmp_path / "run" / "checkpoints") == []
    assert [path.name for host in hosts for path in Path(host.path).iterdir()] == [".run-id", ".run-id"]


def test_a_launching_machine_that_cannot_keep_a_checkpoint_ends_the_run(tmp_path: Path, hosts) -> None:
    gather = gathering(tmp_path)
    (tmp_path / "run" / "checkpoints").write_text("a file in the place of the folder")
    written(Path(hosts[0].path, "checkpoints"), 2)
    gather.progressed({"step": 2, "saved": 2}, hosts)
    with pytest.raises(OSError, match="checkpoints"):
        gather.end(hosts)
    with pytest.raises(OSError, match="checkpoints"):
        gather.progressed({"step": 3}, hosts)
