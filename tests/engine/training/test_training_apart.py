"""Ranks whose hosts have run directories of their own: no checkpoint depends on one host, and curves stay the same."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from engine.training.manifest import checkpoints, damage, read_manifest
from tests.engine.training.training_runs import begin, config, curve, go_on, order
from tests.ranks import run_on_ranks
from tests.slow import slow

NEWEST = "step-00000004"


def own_directory(folder: str, hosts: list[int]) -> Path:
    """The run directory of this rank's host; `hosts` are those of all ranks."""
    return Path(folder, f"host{hosts[dist.get_rank()]}")


def start(folder: str, hosts: list[int], *, resume: bool = False, stop_after: int | None = None, **changes):
    """One start of a run whose ranks are on these hosts."""
    case = config(**{"cp_size": len(hosts)} | changes)
    return go_on(own_directory(folder, hosts), order(case, resume=resume), stop_after)


def held(folder: str, host: int) -> list[str]:
    """Names of a host's checkpoints that are whole, newest first."""
    found = checkpoints(Path(folder, f"host{host}", "checkpoints"))
    return [path.name for path in found if not damage(path, read_manifest(path).files)]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("apart")


@pytest.fixture(scope="module")
def whole(place: Path) -> dict[str, Any]:
    """The run without a stop, on two ranks that share a directory."""
    return run_on_ranks(2, start, str(place / "whole"), [0, 0])[0]


@pytest.fixture(scope="module")
def stopped(place: Path) -> dict[str, Any]:
    """The same run on two hosts that share nothing, stopped after step 4."""
    return run_on_ranks(2, _stopped, str(place / "stopped"))[0]


def _stopped(folder: str) -> dict[str, Any]:
    return start(folder, [0, 1], stop_after=4)


def resumed(folder: str, hosts: list[int], changes: dict[str, Any]) -> dict[str, Any]:
    return start(folder, hosts, resume=True, **changes)


def copy(place: Path, name: str) -> str:
    """The stopped run as both hosts hold it, for one test to change."""
    shutil.copytree(place / "stopped", place / name)
    return str(place / name)


def test_every_checkpoint_is_whole_on_two_hosts(stopped, place: Path) -> None:
    assert (stopped["finished"], stopped["steps_done"]) == (False, 4)
    for host in (0, 1):
        assert held(str(place / "stopped"), host) == [NEWEST, "step-00000002"]
        left = sorted(path.name for path in (place / "stopped" / f"host{host}" / "checkpoints").iterdir())
        assert left == ["latest", "step-00000002", NEWEST]
    [note] = stopped["notes"]
    assert note.startswith("the hosts do not share the run directory: each checkpoint is gathered, whole on ")


@pytest.mark.parametrize("lost", [0, *slow(1)])
def test_a_run_that_lost_one_hosts_directory_goes_on_bit_for_bit(whole, stopped, place: Path, lost: int) -> None:
    folder = copy(place, f"lost{lost}")
    shutil.rmtree(Path(folder, f"host{lost}"))
    [found, _] = run_on_ranks(2, resumed, folder, [0, 1], {})
    assert (found["finished"], found["parameters"]) == (True, whole["parameters"])
    assert curve(found)[-2:] == curve(whole)[-2:]
    assert held(folder, lost)[0] == held(folder, 1 - lost)[0] == "step-00000006"


@pytest.mark.slow
def test_a_checkpoint_that_is_damaged_on_one_host_is_taken_from_the_other(whole, stopped, place: Path) -> None:
    folder = copy(place, "damaged")
    [path] = Path(folder, "host0", "checkpoints", NEWEST).glob("__1_*.distcp")
    path.write_bytes(path.read_bytes()[::-1])
    [found, _] = run_on_ranks(2, resumed, folder, [0, 1], {})
    assert f"checkpoint {NEWEST} is skipped because its file {path.name} has changed" in found["notes"][1]
    assert curve(found) == curve(whole)


@pytest.mark.slow
def test_fewer_and_more_hosts_go_on_within_rounding_and_a_third_host_keeps_nothing(whole, stopped, place: Path) -> None:
    fewer = copy(place, "fewer")
    [found] = run_on_ranks(1, resumed, fewer, [1], {})
    assert [line[2] for line in curve(found)[-2:]] == pytest.approx([line[2] for line in curve(whole)[-2:]], rel=2e-5)
    more = copy(place, "more")
    replicas = {"cp_size": 2, "world_size": 4, "batch_size": 1}
    found = run_on_ranks(4, resumed, more, [0, 1, 2, 2], replicas)[0]
    assert [line[2] for line in curve(found)[-2:]] == pytest.approx([line[2] for line in curve(whole)[-2:]], rel=2e-5)
    assert held(more, 0)[0] == held(more, 1)[0] == "step-00000006"
    assert list(Path(more, "host2", "checkpoints").iterdir()) == []


def without_room(folder: str) -> tuple[str, list[str]]:
    """The sentence of a save that one of the hosts has no room to keep, and what that host has left."""
    run = own_directory(folder, [0, 1])
    training = begin(run, order(config(cp_size=2)))
    training.checkpoints.save(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for what rank 0 writes itself, and not for the larger file that it receives.
    sizes = {path.name: path.stat().st_size for path in (run / "checkpoints" / "step-00000001").glob("__*")}
    if dist.get_rank() == 0:
        assert sizes["__0_0.distcp"] < sizes["__1_0.distcp"], sizes
        resource.setrlimit(resource.RLIMIT_FSIZE, (sizes["__0_0.distcp"], limits[1]))
    try:
        training.checkpoints.save(2)
    except OSError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return said, sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_host_without_room_for_the_others_files_ends_all_ranks_and_keeps_the_earlier_checkpoint(place: Path) -> None:
    for said, left in run_on_ranks(2, without_room, str(place / "full")):
        assert said.startswith("the state after step 2 cannot be gathered: __1_0.distcp cannot be written (File too")
        assert left == ["latest", "step-00000001"]


def with_own_data(folder: str, texts: list[str | None]) -> str:
    """The refusal of a run whose hosts have these texts at one path, seen by each host alone."""
    rank = dist.get_rank()
    os.environ["BURST_CACHE"] = str(Path(folder, f"cache{rank}"))
    os.chdir(_made(Path(folder, f"place{rank}")))
    if (text := texts[rank]) is not None:
        Path("text.txt").write_text(text)
    return start(folder, [0, 1], data="text.txt")["refused"]


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["a text " * 6000, None], ": data 'text.txt' is no file and no token store; give python_docs"),
        *slow((["a text " * 6000, "b text " * 6000], "(data of sha256: ")),
    ],
)
def test_hosts_with_other_data_or_none_are_refused_on_every_rank(place: Path, tmp_path: Path, texts, words) -> None:
    first, second = run_on_ranks(2, with_own_data, str(tmp_path), texts)
    assert first == second
    assert words in first
