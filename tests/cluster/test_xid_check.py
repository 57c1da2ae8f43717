"""XID errors in kernel logs. The lines are written by us after the format NVIDIA's XID documentation shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.checks.kernel_log import xid
from cluster.inventory.site import Site
from cluster.probing.probe import Output
from cluster.profiles import Board, default_profiles
from cluster.transport.reach import LocalRunner
from tests.cluster.gpu_outputs import EIGHT, MODELS, NO_GPUS, STRANGER, board
from tests.patience import AMPLE
from tests.programs import shell_program

MESSAGE = "NVRM: Xid (PCI:0000:{bus}:00): {number}, pid='<unknown>', name=<unknown>, something happened"


def log(*events: tuple[float, int, str], uptime: float = 100_000.0, source: str = "dmesg") -> Output:
    host = "gpu01 kernel: " if source == "journal" else ""
    lines = [f"[{at:12.6f}] {host}{MESSAGE.format(number=number, bus=bus)}" for at, number, bus in events]
    return Output(text="\n".join([f"uptime {uptime}", f"source {source}", *lines]))


@pytest.mark.parametrize("source", ["dmesg", "journal"])
def test_a_quiet_log_is_ok(source: str) -> None:
    assert xid.judge(log(source=source), EIGHT, board("h200")).level == "ok"


REBOOT = {"a100": {64, 79, 95}, "a800": {64, 79, 95}, "h100": {79}, "h200": {79}}
# What Azure's health check fails on, and what NVIDIA's catalog asks a reset or reboot for beyond that.
AZURE = {48, 56, 57, 58, 62, 63, 64, 65, 68, 69, 73, 74, 79, 80, 81, 92, 119, 120}
SERIOUS = AZURE | {95, 109, 110, 136, 140, 143}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("source", ["dmesg", "journal"])
@pytest.mark.parametrize("number", sorted(SERIOUS | {13, 31, 43, 94, 121, 154}))
def test_every_number_asks_for_what_its_family_needs(number: int, source: str, model: str) -> None:
    verdict = xid.judge(log((99_000.0, number, "47"), source=source), EIGHT, board(model))
    expected = "reboot" if number in REBOOT[model] else "reset" if number in SERIOUS else "monitor"
    assert verdict.action == expected
    assert verdict.level == ("fail" if number in SERIOUS else "warn")
    assert f"XID {number} within 2 hours (0000:47:00 x 1): {default_profiles().xids[number].means}" in verdict.summary


def test_only_the_last_two_hours_count() -> None:
    assert xid.judge(log((92_799.0, 79, "47")), EIGHT, board("h200")).level == "ok"
    assert xid.judge(log((92_801.0, 79, "47")), EIGHT, board("h200")).level == "fail"


def test_the_worst_of_several_is_the_verdict_and_all_are_counted() -> None:
    verdict = xid.judge(log((99_000.0, 13, "07"), (99_001.0, 13, "07"), (99_002.0, 48, "BD")), EIGHT, board("h100"))
    assert (verdict.level, verdict.action) == ("fail", "reset")
    assert verdict.facts["counters"] == {"0000:07:00 xid13": 2, "0000:BD:00 xid48": 1}


@pytest.mark.parametrize("gpus", [STRANGER, NO_GPUS])
def test_a_model_without_a_profile_is_judged_by_the_catalogue(gpus: Board) -> None:
    verdict = xid.judge(log((99_000.0, 79, "47")), EIGHT, gpus)
    assert (verdict.level, verdict.action) == ("fail", "reboot")
    assert "fallen off the PCIe bus; reboot the node; when it returns, look at power" in verdict.summary
    assert xid.judge(log(), EIGHT, gpus).level == "ok"


def test_a_number_of_no_catalogue_is_a_warning_that_says_so() -> None:
    verdict = xid.judge(log((99_000.0, 987, "47")), EIGHT, board("h200"))
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


def test_a_log_this_user_may_not_read_is_said_to_be_unseen() -> None:
    denied = Output(text="uptime 5.0\ndenied dmesg: read kernel buffer failed: Operation not permitted")
    verdict = xid.judge(denied, EIGHT, board("h200"))
    assert (verdict.level, "group adm" in verdict.summary) == ("warn", True)
    assert xid.judge(denied, Site(), NO_GPUS).level == "ok"


@pytest.mark.parametrize("journal", [True, False])
def test_the_probe_reads_the_journal_where_there_is_one_and_dmesg_otherwise(
    journal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
