"""Partition keys, error counters and firmware of ports, read from trees written after sysfs-class-infiniband."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.checks.network import PER_HOUR, adapters, pkey, port_errors
from cluster.inventory.site import NetworkExpectation, Site
from cluster.probing.probe import Output, Probe
from cluster.transport.reach import LocalRunner
from tests.patience import AMPLE

NAMED = Site(network=NetworkExpectation(hcas=("mlx5_0",)))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two InfiniBand adapters with a port each."""
    for number in (0, 1):
        device = tmp_path / f"mlx5_{number}"
        write(device / "fw_ver", "28.39.1002")
        write(device / "board_id", "MT_0000000838")
        write(device / f"device/net/ib{number}/mtu", "4092")
        write(device / f"device/net/ib{number}/operstate", "up")
        port = device / "ports/1"
        for name, value in (("link_layer", "InfiniBand"), ("state", "4: ACTIVE"), ("pkeys/0", "0xffff"),
                            ("pkeys/1", "0x8001"), ("pkeys/2", "0x0000")):  # fmt: skip
            write(port / name, value)
        for counter in PER_HOUR:
            write(port / "counters" / counter, "3")
    return tmp_path


def write(path: Path, value: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value + "\n")


def look(probe: Probe, tree: Path, between: str = ":") -> Output:
    """What the probe prints of the tree; `between` runs where it would wait."""
    script = probe.script.replace("/sys/class/infiniband", str(tree)).replace("sleep 2", between)
    return Output(text=LocalRunner().run(["sh", "-c", script], deadline_seconds=AMPLE).stdout)


def test_full_members_are_ok_and_their_keys_can_be_compared(tree: Path) -> None:
    verdict = pkey.judge(look(pkey.probe(Site()), tree), NAMED)
    assert (verdict.level, verdict.summary) == ("ok", "2 InfiniBand ports with full membership")
    assert verdict.facts["pkeys"] == ["0x8001 0xffff"]


@pytest.mark.parametrize("keys", ["0x7fff", "0x0000"])
def test_a_limited_member_fails_where_the_site_names_it_and_is_worth_a_look_elsewhere(keys: str, tree: Path) -> None:
    for number in (0, 1):
        write(tree / "mlx5_0/ports/1/pkeys" / str(number), keys)
    output = look(pkey.probe(Site()), tree)
    assert pkey.judge(output, NAMED).level == "fail"
    assert f"(keys: {'none' if keys == '0x0000' else keys})" in pkey.judge(output, NAMED).summary
    assert pkey.judge(output, Site()).level == "warn"
    assert pkey.judge(output, Site(network=NetworkExpectation(hcas=("mlx5_1",)))).level == "warn"


def test_ports_that_are_down_or_ethernet_need_no_key(tree: Path) -> None:
    for name, value in (("mlx5_0/ports/1/state", "1: DOWN"), ("mlx5_1/ports/1/link_layer", "Ethernet")):
        write(tree / name, value)
    write(tree / "mlx5_0/ports/1/pkeys/0", "0x0000")
    assert pkey.judge(look(pkey.probe(Site()), tree), Site()).summary == "no InfiniBand ports with full membership"
    assert pkey.judge(Output(text=""), Site()).level == "unknown"


def test_counters_that_rest_are_ok_and_kept(tree: Path) -> None:
    verdict = port_errors.judge(look(port_errors.probe(Site()), tree), Site())
    assert (verdict.level, verdict.summary) == ("ok", "no error counter of 2 ports rises")
    assert verdict.facts["counters"]["mlx5_1:1 symbol_error"] == 3  # type: ignore[index]


def test_a_counter_that_rises_while_it_is_looked_at_is_a_rate(tree: Path) -> None:
    rising = look(port_errors.probe(Site()), tree, f"echo 43 >{tree}/mlx5_1/ports/1/counters/symbol_error")
    verdict = port_errors.judge(rising, Site())
    assert verdict.level == "warn"
    assert "mlx5_1:1 symbol_error by 20 a second" in verdict.summary
    assert verdict.facts["counters"]["mlx5_1:1 symbol_error"] == 43  # type: ignore[index]


def test_a_machine_without_ports_does_not_wait(tmp_path: Path) -> None:
    output = look(port_errors.probe(Site()), tmp_path / "absent", "echo waited")
    assert "waited" not in output.text
    assert port_errors.judge(output, Site()).summary == "no error counter of no ports rises"
    assert port_errors.judge(Output(text="x"), Site()).level == "unknown"


def test_adapters_of_one_kind_carry_one_firmware(tree: Path) -> None:
    verdict = adapters.judge(look(adapters.probe(Site()), tree), Site())
    assert (verdict.level, verdict.summary) == ("ok", "2 adapters, firmware MT_0000000838 28.39.1002")
    assert verdict.facts == {"firmware": {"MT_0000000838": ["28.39.1002"]}, "mtu": "4092"}
    write(tree / "mlx5_1/fw_ver", "28.36.1010")
    differing = adapters.judge(look(adapters.probe(Site()), tree), Site())
    assert differing.level == "warn"
    assert "MT_0000000838: 28.36.1010, 28.39.1002" in differing.summary
    write(tree / "mlx5_1/board_id", "MT_0000000222")
    assert adapters.judge(look(adapters.probe(Site()), tree), Site()).level == "ok", "another kind of adapter"


def test_no_adapter_is_ok_and_no_answer_unknown(tmp_path: Path) -> None:
    assert adapters.judge(look(adapters.probe(Site()), tmp_path / "absent"), Site()).summary == "no adapter"
    assert adapters.judge(Output(text=""), Site()).level == "unknown"
