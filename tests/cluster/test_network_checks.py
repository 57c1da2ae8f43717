"""Ports, interfaces and what they need, judged on what sysfs and iproute2 print.

sysfs rows and ip's JSON are written by us after the kernel's sysfs-class-infiniband document and ip-address(8); the
probes themselves run here against a folder laid out like sysfs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.checks import Check
from cluster.checks.network import infiniband, interface, memlock, peermem
from cluster.inventory.site import NetworkExpectation, Site
from cluster.probing.probe import Output
from cluster.transport.reach import LocalRunner
from tests.cluster.gpu_outputs import EIGHT, NO_GPUS, STRANGER, board
from tests.patience import AMPLE

NDR, HDR = "400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)"


def port(device: str, rate: str = NDR, state: str = "4: ACTIVE", phys: str = "5: LinkUp", layer: str = "InfiniBand",
         downed: str = "0") -> str:  # fmt: skip
    return f"port {device}|1|{state}|{phys}|{rate}|{layer}|{downed}|0"


def ports(*rows: str) -> Output:
    return Output(text="\n".join([*rows, "end"]))


def named(*hcas: str, rate: float | None = None) -> Site:
    return Site(network=NetworkExpectation(hcas=hcas, port_rate_gbps=rate))


FOUR = [port(f"mlx5_{n}") for n in range(4)]


@pytest.mark.parametrize("site", [Site(), named("mlx5_0", "mlx5_1:1"), named("mlx5_0", rate=400.0)])
def test_ports_up_at_their_rate_are_ok(site: Site) -> None:
    verdict = infiniband.judge(ports(*FOUR), site, board("h200"))
    assert (verdict.level, verdict.summary) == ("ok", "4 ports up at 400 Gb/s")
    assert verdict.facts["counters"] == {f"mlx5_{n}:1 link_downed": 0 for n in range(4)}


@pytest.mark.parametrize("model", ["a100", "a800"])
def test_hdr_is_the_rate_of_a100_and_too_slow_for_h100(model: str) -> None:
    rows = ports(*(port(f"mlx5_{n}", HDR) for n in range(4)))
    site = named("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")
    assert infiniband.judge(rows, site, board(model)).level == "ok"
    verdict = infiniband.judge(rows, site, board("h100"))
    assert (verdict.level, verdict.action) == ("fail", "isolate")
    assert "mlx5_0:1 has 200 Gb/s; expected 400 Gb/s" in verdict.summary


@pytest.mark.parametrize(
    "broken",
    [
        port("mlx5_2", state="1: DOWN", phys="3: Disabled"),
        port("mlx5_2", state="1: DOWN", phys="2: Polling"),
        port("mlx5_2", state="2: INIT"),
        port("mlx5_2", rate="100 Gb/sec (4X EDR)"),
        port("mlx5_2", rate="?"),
    ],
)
def test_a_port_the_site_names_must_be_up_at_its_rate_others_are_worth_a_look(broken: str) -> None:
    rows = ports(*FOUR[:2], broken, FOUR[3])
    assert infiniband.judge(rows, named("mlx5_2"), board("h200")).level == "fail"
    assert infiniband.judge(rows, named("mlx5_1"), board("h200")).level == "ok"
    verdict = infiniband.judge(rows, Site(), board("h200"))
    assert verdict.level == "warn"
    assert "network.hcas" in verdict.summary


def test_an_absent_adapter_fails_and_a_name_is_exact() -> None:
    verdict = infiniband.judge(ports(port("mlx5_10")), named("mlx5_1"), board("h200"))
    assert verdict.level == "fail"
    assert verdict.summary.startswith("mlx5_1 is absent")


def test_no_port_up_at_all_fails() -> None:
    rows = ports(port("mlx5_0", state="1: DOWN", phys="2: Polling"), port("mlx5_1", state="1: DOWN", phys="2: Polling"))
    assert infiniband.judge(rows, Site(), board("h200")).level == "fail"


def test_a_roce_port_has_the_rate_the_site_says_or_none() -> None:
    rows = ports(port("mlx5_0", "100 Gb/sec (4X EDR)", layer="Ethernet"))
    assert infiniband.judge(rows, named("mlx5_0"), board("h200")).level == "ok"
    assert infiniband.judge(rows, named("mlx5_0", rate=200.0), board("h200")).level == "fail"


def test_hosts_without_adapters_are_ok_unless_the_site_names_some() -> None:
    assert infiniband.judge(ports(), Site(), NO_GPUS).level == "ok"
    assert infiniband.judge(ports(), named(), NO_GPUS).level == "ok"
    assert infiniband.judge(ports(), named("mlx5_0"), NO_GPUS).level == "fail"
    assert infiniband.judge(ports(port("mlx5_0", state="1: DOWN")), named(), board("h200")).level == "ok"


def test_the_rate_of_an_unknown_model_is_unknown_unless_the_site_says_it() -> None:
    assert infiniband.judge(ports(*FOUR), Site(), STRANGER).level == "unknown"
    assert infiniband.judge(ports(*FOUR), named("mlx5_0", rate=400.0), STRANGER).level == "ok"


def test_the_probe_reads_every_port_of_a_tree_like_sysfs(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/infiniband/mlx5_3/ports/1"
    (folder / "counters").mkdir(parents=True)
    for name, content in (("state", "4: ACTIVE"), ("phys_state", "5: LinkUp"), ("rate", NDR),
                          ("link_layer", "InfiniBand"), ("counters/link_downed", "7")):  # fmt: skip
        (folder / name).write_text(content + "\n")
    script = infiniband.probe(Site()).script.replace("/sys/class/infiniband", f"{tmp_path}/sys/class/infiniband")
    done = LocalRunner().run(["sh", "-c", script], deadline_seconds=AMPLE)
    verdict = infiniband.judge(Output(text=done.stdout), named("mlx5_3"), board("h200"))
    assert verdict.level == "ok"
    assert verdict.facts["counters"] == {"mlx5_3:1 link_downed": 7}


def addresses(*links: dict[str, Any]) -> Output:
    loopback = {"ifname": "lo", "flags": ["LOOPBACK", "UP"], "mtu": 65536, "addr_info": [{"local": "127.0.0.1"}]}
    return Output(text=json.dumps([loopback, {}, *links]))


def link(name: str = "bond0", mtu: int = 9000, state: str = "UP", local: str | None = "10.0.0.7") -> dict[str, Any]:
    entries = [{"family": "inet", "local": local}] if local else []
    flags = ["BROADCAST", "UP"] if state != "DOWN" else ["BROADCAST"]
    return {"ifname": name, "flags": flags, "mtu": mtu, "operstate": state, "addr_info": entries}


JUMBO = Site(network=NetworkExpectation(interface="bond0", mtu=9000))


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        (link(), "ok", "bond0 is up at 10.0.0.7, MTU 9000"),
        (link(mtu=1500), "warn", "MTU of 1500; the site expects 9000"),
        (link(state="DOWN"), "warn", "bond0 is DOWN"),
        (link(local=None), "warn", "has no address"),
        (link("eth0"), "warn", "bond0 is absent; there are eth0, lo"),
    ],
)
def test_the_interface_is_as_the_site_says(found: dict[str, Any], level: str, words: str) -> None:
    verdict = interface.judge(addresses(found), JUMBO)
    assert verdict.level == level
    assert words in verdict.summary


def test_a_site_that_names_no_interface_takes_what_is_up() -> None:
    assert interface.judge(addresses(link("eth0", 1500)), Site()).summary == "up: eth0"
    assert interface.judge(addresses(), Site()).level == "ok"


def test_this_machines_interfaces_can_be_read() -> None:
    done = LocalRunner().run(["sh", "-c", interface.probe(Site()).script], deadline_seconds=AMPLE)
    assert interface.judge(Output(text=done.stdout, exit_status=done.exit_status), Site()).level == "ok"


def test_a_machine_without_iproute2_is_unknown_only_where_an_interface_is_expected() -> None:
    absent = Output(text="", exit_status=127)
    assert interface.judge(absent, JUMBO).level == "unknown"
    assert interface.judge(absent, Site()).level == "ok"


@pytest.mark.parametrize(
    ("text", "gpus", "level"),
    [
        ("module nvidia_peermem\nhcas 8", True, "ok"),
        ("module nv_peer_mem\nhcas 8", True, "ok"),
        ("hcas 8", True, "warn"),
        ("hcas 0", True, "ok"),
        ("hcas 8", False, "ok"),
        ("awk: not found", True, "unknown"),
    ],
)
def test_peer_memory_is_wanted_where_gpus_and_adapters_meet(text: str, gpus: bool, level: str) -> None:
    assert peermem.judge(Output(text=text), Site(), board("h200") if gpus else NO_GPUS).level == level


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("memlock unlimited\nhcas 8", "ok"),
        ("memlock 16777216\nhcas 8", "ok"),
        ("memlock 16777215\nhcas 8", "warn"),
        ("memlock 64\nhcas 8", "warn"),
        ("memlock 64\nhcas 0", "ok"),
        ("memlock\nhcas 8", "unknown"),
    ],
)
def test_locked_memory_matters_where_there_is_an_adapter(text: str, level: str) -> None:
    assert memlock.judge(Output(text=text), EIGHT).level == level


def test_a_small_limit_of_locked_memory_is_said_in_a_unit_that_suits_it() -> None:
    assert memlock.judge(Output(text="memlock 64\nhcas 8"), EIGHT).summary.startswith("only 0.0625 MiB of memory")
    assert memlock.judge(Output(text="memlock 2097152\nhcas 0"), EIGHT).summary.startswith("2 GiB of memory")


@pytest.mark.parametrize("check", [memlock, peermem])
def test_these_probes_answer_on_any_linux(check: Check) -> None:
    done = LocalRunner().run(["sh", "-c", check.probe(Site()).script], deadline_seconds=AMPLE)
    assert check.judge(Output(text=done.stdout), Site()).level != "unknown"
