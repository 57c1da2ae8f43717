"""Ports, their counters, keys and firmware, interfaces and what they need, on what sysfs and iproute2 print.

sysfs rows and ip's JSON are written by us after the kernel's sysfs-class-infiniband document and ip-address(8); the
probes themselves run here against folders laid out like sysfs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.checks import Check
from cluster.checks.network import PER_HOUR, adapters, infiniband, interface, memlock, peermem, pkey, port_errors
from cluster.inventory.site import NetworkExpectation, Site
from cluster.probing.probe import Output
from cluster.profiles import Board
from cluster.transport.reach import LocalRunner
from tests.cluster.gpu_outputs import NO_GPUS, STRANGER, board, judge, look
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
    verdict = infiniband.judge(look(infiniband, sys=f"{tmp_path}/sys"), named("mlx5_3"), board("h200"))
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
    assert interface.judge(look(interface), Site()).level == "ok"


def test_a_machine_without_iproute2_is_unknown_only_where_an_interface_is_expected() -> None:
    absent = Output(text="", exit_status=127)
    assert interface.judge(absent, JUMBO).level == "unknown"
    assert interface.judge(absent, Site()).level == "ok"


@pytest.mark.parametrize(
    ("check", "text", "gpus", "level", "words"),
    [
        (peermem, "module nvidia_peermem\nhcas 8", board("h200"), "ok", "nvidia_peermem is loaded"),
        (peermem, "module nv_peer_mem\nhcas 8", board("h200"), "ok", "nv_peer_mem is loaded"),
        (peermem, "hcas 8", board("h200"), "warn", "modprobe nvidia_peermem"),
        (peermem, "hcas 0", board("h200"), "ok", ""),
        (peermem, "hcas 8", NO_GPUS, "ok", "no GPU and adapter to join"),
        (peermem, "awk: not found", board("h200"), "unknown", "awk: not found"),
        (memlock, "memlock unlimited\nhcas 8", NO_GPUS, "ok", "unlimited"),
        (memlock, "memlock 16777216\nhcas 8", NO_GPUS, "ok", "16 GiB of memory"),
        (memlock, "memlock 16777215\nhcas 8", NO_GPUS, "warn", "expected 16; set memlock in limits.conf"),
        (memlock, "memlock 64\nhcas 8", NO_GPUS, "warn", "only 0.0625 MiB of memory"),
        (memlock, "memlock 64\nhcas 0", NO_GPUS, "ok", "no adapter that needs more"),
        (memlock, "memlock 2097152\nhcas 0", NO_GPUS, "ok", "2 GiB of memory"),
        (memlock, "memlock\nhcas 8", NO_GPUS, "unknown", ""),
    ],
)
def test_what_adapters_need_of_the_host(check: Check, text: str, gpus: Board, level: str, words: str) -> None:
    verdict = judge(check, text, Site(), gpus)
    assert verdict.level == level
    assert words in verdict.summary


@pytest.mark.parametrize("check", [memlock, peermem])
def test_these_probes_answer_on_any_linux(check: Check) -> None:
    assert check.judge(look(check), Site()).level != "unknown"


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


def look_at(check: Check, tree: Path, between: str = ":") -> Output:
    """What the probe prints of the tree; `between` runs where it would wait."""
    script = check.probe(Site()).script.replace("/sys/class/infiniband", str(tree)).replace("sleep 2", between)
    return Output(text=LocalRunner().run(["sh", "-c", script], deadline_seconds=AMPLE).stdout)


def test_full_members_are_ok_and_their_keys_can_be_compared(tree: Path) -> None:
    verdict = pkey.judge(look_at(pkey, tree), NAMED)
    assert (verdict.level, verdict.summary) == ("ok", "2 InfiniBand ports with full membership")
    assert verdict.facts["pkeys"] == ["0x8001 0xffff"]


@pytest.mark.parametrize("keys", ["0x7fff", "0x0000"])
def test_a_limited_member_fails_where_the_site_names_it_and_is_worth_a_look_elsewhere(keys: str, tree: Path) -> None:
    for number in (0, 1):
        write(tree / "mlx5_0/ports/1/pkeys" / str(number), keys)
    output = look_at(pkey, tree)
    assert pkey.judge(output, NAMED).level == "fail"
    assert f"(keys: {'none' if keys == '0x0000' else keys})" in pkey.judge(output, NAMED).summary
    assert pkey.judge(output, Site()).level == "warn"
    assert pkey.judge(output, Site(network=NetworkExpectation(hcas=("mlx5_1",)))).level == "warn"


def test_ports_that_are_down_or_ethernet_need_no_key(tree: Path) -> None:
    for name, value in (("mlx5_0/ports/1/state", "1: DOWN"), ("mlx5_1/ports/1/link_layer", "Ethernet")):
        write(tree / name, value)
    write(tree / "mlx5_0/ports/1/pkeys/0", "0x0000")
    assert pkey.judge(look_at(pkey, tree), Site()).summary == "no InfiniBand ports with full membership"
    assert pkey.judge(Output(text=""), Site()).level == "unknown"


def test_counters_that_rest_are_ok_and_kept(tree: Path) -> None:
    verdict = port_errors.judge(look_at(port_errors, tree), Site())
    assert (verdict.level, verdict.summary) == ("ok", "no error counter of 2 ports rises")
    assert verdict.facts["counters"]["mlx5_1:1 symbol_error"] == 3  # type: ignore[index]


def test_a_counter_that_rises_while_it_is_looked_at_is_a_rate(tree: Path) -> None:
    rising = look_at(port_errors, tree, f"echo 43 >{tree}/mlx5_1/ports/1/counters/symbol_error")
    verdict = port_errors.judge(rising, Site())
    assert verdict.level == "warn"
    assert "mlx5_1:1 symbol_error by 20 a second" in verdict.summary
    assert verdict.facts["counters"]["mlx5_1:1 symbol_error"] == 43  # type: ignore[index]


def test_a_machine_without_ports_does_not_wait(tmp_path: Path) -> None:
    output = look_at(port_errors, tmp_path / "absent", "echo waited")
    assert "waited" not in output.text
    assert port_errors.judge(output, Site()).summary == "no error counter of no ports rises"
    assert port_errors.judge(Output(text="x"), Site()).level == "unknown"


def test_adapters_of_one_kind_carry_one_firmware(tree: Path) -> None:
    verdict = adapters.judge(look_at(adapters, tree), Site())
    assert (verdict.level, verdict.summary) == ("ok", "2 adapters, firmware MT_0000000838 28.39.1002")
    assert verdict.facts == {"firmware": {"MT_0000000838": ["28.39.1002"]}, "mtu": "4092"}
    write(tree / "mlx5_1/fw_ver", "28.36.1010")
    differing = adapters.judge(look_at(adapters, tree), Site())
    assert differing.level == "warn"
    assert "MT_0000000838: 28.36.1010, 28.39.1002" in differing.summary
    write(tree / "mlx5_1/board_id", "MT_0000000222")
    assert adapters.judge(look_at(adapters, tree), Site()).level == "ok", "another kind of adapter"


def test_no_adapter_is_ok_and_no_answer_unknown(tmp_path: Path) -> None:
    assert adapters.judge(look_at(adapters, tmp_path / "absent"), Site()).summary == "no adapter"
    assert adapters.judge(Output(text=""), Site()).level == "unknown"
