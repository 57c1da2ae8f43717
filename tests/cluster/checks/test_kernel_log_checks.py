"""The kernel log: XIDs, SXIDs, disk errors and lost links, after the drivers' formats (outputs/README.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.checks.kernel_log import PROBE, disk_errors, link_flaps, sxid, xid
from cluster.inventory.site import NetworkExpectation, Site
from cluster.probing.probe import Output
from cluster.profiles import Board, default_profiles
from cluster.transport.reach import LocalRunner
from tests.cluster.gpu_outputs import ANY_SITE, EIGHT, MODELS, NO_GPUS, OUTPUTS, STRANGER, board
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
    warned = xid.judge(denied, EIGHT, board("h200"))
    assert (warned.level, "group adm" in warned.summary) == ("warn", True)
    assert xid.judge(denied, ANY_SITE).level == "ok", "where no GPU is expected"
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


XID_MESSAGE = "NVRM: Xid (PCI:0000:{bus}:00): {number}, pid='<unknown>', name=<unknown>, something happened"


def xids(*events: tuple[float, int, str], uptime: float = 100_000.0, source: str = "dmesg") -> Output:
    host = "gpu01 kernel: " if source == "journal" else ""
    lines = [f"[{at:12.6f}] {host}{XID_MESSAGE.format(number=number, bus=bus)}" for at, number, bus in events]
    return Output(text="\n".join([f"uptime {uptime}", f"source {source}", *lines]))


@pytest.mark.parametrize("source", ["dmesg", "journal"])
def test_a_quiet_log_is_ok(source: str) -> None:
    assert xid.judge(xids(source=source), EIGHT, board("h200")).level == "ok"


REBOOT = {"a100": {64, 79, 95}, "a800": {64, 79, 95}, "h100": {79}, "h200": {79}}
# What Azure's health check fails on, and what NVIDIA's catalog asks a reset or reboot for beyond that.
AZURE = {48, 56, 57, 58, 62, 63, 64, 65, 68, 69, 73, 74, 79, 80, 81, 92, 119, 120}
SERIOUS = AZURE | {95, 109, 110, 136, 140, 143}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("source", ["dmesg", "journal"])
@pytest.mark.parametrize("number", sorted(SERIOUS | {13, 31, 43, 94, 121, 154}))
def test_every_number_asks_for_what_its_family_needs(number: int, source: str, model: str) -> None:
    verdict = xid.judge(xids((99_000.0, number, "47"), source=source), EIGHT, board(model))
    expected = "reboot" if number in REBOOT[model] else "reset" if number in SERIOUS else "monitor"
    assert verdict.action == expected
    assert verdict.level == ("fail" if number in SERIOUS else "warn")
    assert f"XID {number} within 2 hours (0000:47:00 x 1): {default_profiles().xids[number].means}" in verdict.summary


def test_only_the_last_two_hours_count() -> None:
    assert xid.judge(xids((92_799.0, 79, "47")), EIGHT, board("h200")).level == "ok"
    assert xid.judge(xids((92_801.0, 79, "47")), EIGHT, board("h200")).level == "fail"


def test_the_worst_of_several_is_the_verdict_and_all_are_counted() -> None:
    verdict = xid.judge(xids((99_000.0, 13, "07"), (99_001.0, 13, "07"), (99_002.0, 48, "BD")), EIGHT, board("h100"))
    assert (verdict.level, verdict.action) == ("fail", "reset")
    assert verdict.facts["counters"] == {"0000:07:00 xid13": 2, "0000:BD:00 xid48": 1}


@pytest.mark.parametrize("gpus", [STRANGER, NO_GPUS])
def test_a_model_without_a_profile_is_judged_by_the_catalogue(gpus: Board) -> None:
    verdict = xid.judge(xids((99_000.0, 79, "47")), EIGHT, gpus)
    assert (verdict.level, verdict.action) == ("fail", "reboot")
    assert "fallen off the PCIe bus; reboot the node; when it returns, look at power" in verdict.summary
    assert xid.judge(xids(), EIGHT, gpus).level == "ok"


def test_a_number_of_no_catalogue_is_a_warning_that_says_so() -> None:
    verdict = xid.judge(xids((99_000.0, 987, "47")), EIGHT, board("h200"))
    assert (verdict.level, "a number of no catalogue here" in verdict.summary) == ("warn", True)


@pytest.mark.parametrize(("word", "level"), [("Fatal", "fail"), ("Nonfatal", "warn")])
def test_an_error_that_the_driver_calls_not_fatal_is_a_warning(word: str, level: str) -> None:
    line = f"[ 99000.0] NVRM: Xid (PCI:0000:47:00): 145, RLW_RXPIPE {word} XC0 i0 Link 02"
    verdict = xid.judge(Output(text=f"uptime 100000.0\nsource dmesg\n{line}"), EIGHT, board("h200"))
    assert verdict.level == level
    assert "NVLink 5: the receiving link layer failed" in verdict.summary


def test_the_catalogue_has_the_numbers_that_matter_with_meaning_and_cure() -> None:
    xids = default_profiles().xids
    assert len(xids) >= 47
    assert set(xids) >= SERIOUS | {46, 154, 155, 156, 158} | set(range(144, 151))
    assert all(len(one.means) > 10 and (one.do or one.action != "monitor") for one in xids.values())


@pytest.mark.parametrize("journal", [True, False])
def test_the_probe_reads_the_journal_where_there_is_one_and_dmesg_otherwise(journal, tmp_path, monkeypatch):
    line = "[    1.500000] {}NVRM: Xid (PCI:0000:47:00): 79, GPU has fallen off the bus."
    asked = 'case "$*" in *"-n 1 "*) echo entry ;; *) echo "' + line.format("gpu01 kernel: ") + '" ;; esac'
    entries = asked if journal else "exit 1"
    for program, body in (("journalctl", entries), ("dmesg", f"echo '{line.format('')}'; echo '[ 2.0] other'")):
        shell_program(tmp_path / program, body)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    done = LocalRunner().run(["sh", "-c", xid.probe(Site()).script], deadline_seconds=AMPLE)
    lines = done.stdout.splitlines()
    assert lines[1:] == [
        f"source {'journal' if journal else 'dmesg'}",
        line.format("gpu01 kernel: " if journal else ""),
    ]
    assert lines[0].startswith("uptime ")
