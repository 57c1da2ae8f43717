"""Adapters measured one by one. No machine here has one: ib_write_bw is played by a program that listens and connects
as the real one does and prints the form of its result (outputs/README.md)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cluster.active import rails as node_rails
from cluster.active.fleet import Plan
from cluster.active.rail_fleet import RailSpeed, facing_rails, find_rails, judge_rails, rails_of, run_rails
from cluster.active.rails import Rail, parse_rails
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import NetworkExpectation, Site
from cluster.profiles import default_profiles
from cluster.transport.reach import connect_local
from tests.cluster.fake_node import FakeNode, a800, h100
from tests.cluster.gpu_outputs import OUTPUTS
from tests.patience import AMPLE

LIMITS = default_profiles().limits
FOUR = tuple(Rail(port=f"mlx5_{number}:1", gpu=number, rate_gbps=400.0) for number in range(4))


@pytest.fixture
def perftest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ib_write_bw first on PATH; `slow` and `broken` in its folder name a device."""
    folder = tmp_path / "perftest"
    folder.mkdir()
    program = folder / "ib_write_bw"
    program.write_text(
        f"#!{sys.executable}\n"
        + textwrap.dedent(f"""\
        import pathlib, socket, sys, time
        folder = pathlib.Path({str(folder)!r})
        words = sys.argv[1:]
        if words == ["--help"]:
            sys.exit(print("      --use_cuda=<cuda device id>  Use CUDA specific device"))
        device, port = words[words.index("-d") + 1], int(words[words.index("-p") + 1])
        with open(folder / "calls", "a") as calls:
            calls.write(" ".join(words) + "\\n")
        named = lambda name: (folder / name).exists() and (folder / name).read_text() == device
        if words[-1].startswith("-"):
            with socket.create_server(("", port)) as server:
                server.accept()
            sys.exit()
        if named("broken"):
            sys.exit("Failed to modify QP to RTR")
        for _ in range(100):
            try:
                socket.create_connection((words[-1], port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        result = pathlib.Path({str(OUTPUTS / "ib_write_bw.txt")!r}).read_text()
        print(result.replace("391.87", "196.02") if named("slow") else result)
        """)
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def nodes(*names: str) -> list[InventoryNode]:
    return [InventoryNode(host=Host(name=name), site=Site()) for name in names]


def plan() -> Plan:
    return Plan(connect=connect_local, profiles=default_profiles(), pair_seconds=60.0)


def test_every_rail_is_measured_from_gpu_to_gpu_and_the_slow_one_named(perftest: Path) -> None:
    (perftest / "slow").write_text("mlx5_2")
    verdicts = run_rails(nodes("a", "b"), {"a": FOUR, "b": FOUR}, plan())
    assert {name: verdict.level for name, verdict in verdicts.items()} == {"a": "warn", "b": "warn"}
    assert verdicts["a"].summary == "slow: mlx5_2:1 196 with b mlx5_2:1 Gb/s; the fleet's median is 391.9"
    assert verdicts["a"].facts["gbps"] == {
        "mlx5_0:1": 391.87, "mlx5_1:1": 391.87, "mlx5_2:1": 196.02, "mlx5_3:1": 391.87,
    }  # fmt: skip
    calls = (perftest / "calls").read_text().splitlines()
    assert len(calls) == 8
    assert sum("-d mlx5_3 -i 1" in call and "--use_cuda=3" in call for call in calls) == 2


def test_a_rail_without_a_result_is_named_with_its_reason_and_ends_nothing_else(perftest: Path) -> None:
    (perftest / "broken").write_text("mlx5_1")
    verdicts = run_rails(nodes("a"), {"a": FOUR[:3]}, plan())
    assert verdicts["a"].level == "warn"
    assert verdicts["a"].summary == "no result: mlx5_1:1 with a mlx5_1:1 (Failed to modify QP to RTR)"
    assert verdicts["a"].facts["gbps"] == {"mlx5_0:1": 391.87, "mlx5_1:1": None, "mlx5_2:1": 391.87}
    ends_at = time.monotonic() + AMPLE
    while subprocess.run(["pgrep", "-f", str(perftest)], capture_output=True, check=False).returncode == 0:
        assert time.monotonic() < ends_at, "the listener that nobody called goes on"
        time.sleep(0.05)


def test_rails_of_one_name_face_each_other_and_one_that_the_other_node_lacks_is_named(perftest: Path) -> None:
    (perftest / "slow").write_text("mlx5_3")
    verdicts = run_rails(nodes("a", "b"), {"a": FOUR, "b": FOUR[:1] + FOUR[2:]}, plan())
    for name, other in (("a", "b"), ("b", "a")):
        assert verdicts[name].level == "warn"
        assert f"slow: mlx5_3:1 196 with {other} mlx5_3:1 Gb/s" in verdicts[name].summary
    assert verdicts["a"].summary.endswith("; not measured: mlx5_1:1, which b lacks")
    assert verdicts["a"].facts["gbps"]["mlx5_1:1"] is None  # type: ignore[index]
    assert set(verdicts["b"].facts["gbps"]) == {"mlx5_0:1", "mlx5_2:1", "mlx5_3:1"}  # type: ignore[call-overload]


def test_rails_of_other_names_face_each_other_in_order() -> None:
    theirs = tuple(Rail(port=name) for name in ("mlx5_1:1", "roce0:1", "roce1:1", "roce2:1"))
    facing, (ours_left, theirs_left) = facing_rails(FOUR[:3], theirs)
    assert [(ours.port, other.port) for ours, other in facing] == [
        ("mlx5_1:1", "mlx5_1:1"), ("mlx5_0:1", "roce0:1"), ("mlx5_2:1", "roce1:1")
    ]  # fmt: skip
    assert (ours_left, [rail.port for rail in theirs_left]) == ([], ["roce2:1"])


def test_a_node_without_the_program_or_without_adapters_is_no_fault(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if node_rails.unavailable() == "":
        pytest.skip("perftest is installed here")
    verdicts = run_rails(nodes("a", "b"), {"a": FOUR}, plan())
    assert set(verdicts) == {"a"}
    assert verdicts["a"].level == "ok"
    assert "ib_write_bw is not installed on the node" in verdicts["a"].summary
    assert run_rails(nodes("a"), {"a": ()}, plan()) == {}
    assert judge_rails({}, {"a": "no answer"}, LIMITS)["a"].level == "warn"


@pytest.mark.parametrize(
    ("speed", "rate", "level"),
    [(391.0, 400.0, "ok"), (359.0, 400.0, "warn"), (355.0, 400.0, "warn"), (300.0, None, "warn")],
)
def test_a_rail_is_judged_beside_the_fleet_and_by_its_own_rate(speed: float, rate: float | None, level: str) -> None:
    usual = [RailSpeed(rail=Rail(port=f"mlx5_{n}:1"), other="b", speed=390.0) for n in range(3)]
    one = RailSpeed(rail=Rail(port="mlx5_9:1", rate_gbps=rate), other="b mlx5_9:1", speed=speed)
    assert judge_rails({"a": [*usual, one]}, {}, LIMITS)["a"].level == level


def test_the_fleet_that_is_slow_as_a_whole_is_found_by_the_ports_rate() -> None:
    slow = [RailSpeed(rail=rail, other="b", speed=200.0) for rail in FOUR]
    assert judge_rails({"a": slow}, {}, LIMITS)["a"].level == "warn"


def test_arguments_of_a_worker_read_back_as_the_rails_they_name() -> None:
    named = [Rail(port="mlx5_0:1", gpu=3), Rail(port="rocep0s0:2")]
    assert parse_rails(",".join(rail.argument for rail in named)) == named
    with pytest.raises(ValueError, match="expected names such as mlx5_0:1=0"):
        parse_rails("mlx5_0")


def test_each_adapter_gets_the_gpu_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode(tmp_path, monkeypatch)
    h100(node)
    rails = rails_of(node.facts(), Site())
    assert [(rail.port, rail.gpu) for rail in rails] == [
        ("mlx5_0:1", 0), ("mlx5_3:1", 1), ("mlx5_4:1", 2), ("mlx5_5:1", 3), ("mlx5_6:1", 4), ("mlx5_9:1", 5),
        ("mlx5_10:1", 6), ("mlx5_11:1", 7),
    ]  # fmt: skip
    assert {rail.rate_gbps for rail in rails} == {400.0}
    [named] = rails_of(node.facts(), Site(network=NetworkExpectation(hcas=("mlx5_9",))))
    assert (named.port, named.gpu) == ("mlx5_9:1", 5)


def test_an_adapter_that_two_gpus_share_takes_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode(tmp_path, monkeypatch)
    a800(node)
    assert [rail.gpu for rail in rails_of(node.facts(), Site())] == [0, 2, 4, 6]


def test_rails_of_this_machine_are_those_its_kernel_shows() -> None:
    found = find_rails(nodes("here"), connect_local, 60.0)
    adapters = Path("/sys/class/infiniband")
    assert bool(found["here"]) == (adapters.is_dir() and any(adapters.iterdir()))
