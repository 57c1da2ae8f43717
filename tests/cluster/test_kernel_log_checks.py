"""SXIDs, disk errors and lost links in the kernel log, written by us after the drivers' formats (outputs/README.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.checks.kernel_log import PROBE, disk_errors, link_flaps, sxid, xid
from cluster.inventory.site import NetworkExpectation, Site
from cluster.probing.probe import Output
from cluster.transport.reach import LocalRunner
from tests.cluster.gpu_outputs import EIGHT, OUTPUTS, board
from tests.patience import AMPLE
from tests.programs import shell_program

LINES = (OUTPUTS / "dmesg.txt").read_text().splitlines()


def log(*words: str, uptime: float = 91_000.0, adapters: tuple[str, ...] = ("ibp26s0",)) -> Output:
    """The lines that hold one of these words."""
    chosen = [line for line in LINES if any(word in line for word in words)]
    assert chosen or not words
    head = [f"uptime {uptime}", *(f"adapter {name}" for name in adapters), "source dmesg"]
    return Output(text="\n".join([*head, *chosen]))


def test_a_fatal_sxid_fails_and_names_its_switch() -> None:
    verdict = sxid.judge(log("SXid"), EIGHT)
    assert (verdict.level, verdict.action) == ("fail", "reset")
    assert verdict.summary.startswith("fatal SXID 20034 of NVSwitch 0000:07:00.0 within 2 hours (x 1)")
    assert verdict.facts["counters"] == {"0000:06:00.0 sxid24007": 1, "0000:07:00.0 sxid20034": 1}


def test_an_sxid_that_is_not_fatal_is_a_warning_and_its_registers_are_no_second_error() -> None:
    verdict = sxid.judge(log("24007"), EIGHT)
    assert (verdict.level, verdict.action) == ("warn", "monitor")
    assert "(x 1)" in verdict.summary
    assert sxid.judge(log("24007", uptime=97_500.0), EIGHT).level == "ok", "more than two hours ago"


def test_blocks_that_cannot_be_read_are_a_warning_but_not_those_of_an_empty_drive() -> None:
    verdict = disk_errors.judge(log("I/O error, dev", "Buffer I/O"), Site())
    assert verdict.level == "warn"
    assert "nvme3n1 x 1, nvme3n1p1 x 1" in verdict.summary
    assert "fd0" not in verdict.summary
    assert disk_errors.judge(log("fd0"), Site()).level == "ok"


@pytest.mark.parametrize(
    ("words", "summary"),
    [
        ("EXT4-fs error", "sda2: file system errors (x 1); replace it"),
        ("Remounting", "sda2: mounted read-only (x 1); replace it"),
        ("XFS", "nvme1n1: file system errors (x 1); replace it"),
        ("controller is down", "nvme2: its controller went down (x 1); replace it"),
    ],
)
def test_a_broken_file_system_or_controller_isolates_the_node(words: str, summary: str) -> None:
    verdict = disk_errors.judge(log(words), Site())
    assert (verdict.level, verdict.action, verdict.summary) == ("fail", "isolate", summary)


def test_a_lost_link_of_an_adapter_is_a_warning_and_five_within_a_day_fail() -> None:
    verdict = link_flaps.judge(log("Link "), Site())
    assert verdict.level == "warn"
    assert "ibp26s0 x 1;" in verdict.summary, "the first was more than a day ago, the container's is no adapter"
    often = log("90006.0")
    assert link_flaps.judge(Output(text=often.text + ("\n" + LINES[11]) * 3), Site()).level == "warn"
    assert link_flaps.judge(Output(text=often.text + ("\n" + LINES[11]) * 4), Site()).level == "fail"


def test_the_sites_own_interface_is_watched_and_networkd_is_understood() -> None:
    said = "[90006.500000] gpu01 systemd-networkd[812]: bond0: Lost carrier"
    output = Output(text=f"{log().text}\n{said}")
    assert link_flaps.judge(output, Site(network=NetworkExpectation(interface="bond0"))).level == "warn"
    assert link_flaps.judge(output, Site()).level == "ok"


def test_a_log_this_user_may_not_read_is_one_warning_and_not_four() -> None:
    denied = Output(text="uptime 5.0\ndenied dmesg: read kernel buffer failed: Operation not permitted")
    levels = [check.judge(denied, EIGHT) for check in (sxid, disk_errors, link_flaps)]
    assert [verdict.level for verdict in levels] == ["ok", "ok", "ok"]
    assert all("stay unseen" in verdict.summary for verdict in levels)
    assert xid.judge(denied, EIGHT, board("h200")).level == "warn"
    assert sxid.judge(Output(text="sh: not found"), EIGHT).level == "unknown"


def test_one_probe_reads_every_kind_of_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program, body in (("journalctl", "exit 1"), ("dmesg", f"cat {OUTPUTS}/dmesg.txt; echo '[1.0] unrelated'")):
        shell_program(tmp_path / program, body)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "infiniband/mlx5_0/device/net/ibp26s0").mkdir(parents=True)
    script = PROBE.script.replace("/sys/class/infiniband", f"{tmp_path}/infiniband")
    printed = LocalRunner().run(["sh", "-c", script], deadline_seconds=AMPLE).stdout.splitlines()
    assert printed[1:3] == ["adapter ibp26s0", "source dmesg"]
    assert sorted(printed[3:]) == sorted(line for line in LINES if "Link up" not in line)
    shared = [check.probe(Site()) for check in (xid, sxid, disk_errors, link_flaps)]
    assert all(probe is PROBE for probe in shared), "it runs once for all"
