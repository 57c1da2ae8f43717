"""A run beside a reference run: a pass or a fail per row, by times, memory and loss, and rows without a partner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import main
from harness.records.record import Record, Round
from tests.harness.synthetic_records import H200, record
from tests.harness.verify.test_verify import reported, verified


def in_rounds(one: Record, *medians: float) -> Record:
    assert one.measurement is not None
    one.rounds = [
        Round(number=number, place=1, started_at=f"2026-01-02T03:0{number}:05Z", wall_seconds=9.0,
              step_seconds=[median, median * 1.001, median * 0.999])
        for number, median in enumerate(medians, start=1)
    ]  # fmt: skip
    one.measurement.step_seconds = [second for part in one.rounds for second in part.step_seconds]
    one.measurement.forward_seconds = []
    return one


def compared(tmp_path: Path, ours: list[Record], theirs: list[Record], capsys: pytest.CaptureFixture[str],
             *options: str) -> tuple[int, str]:  # fmt: skip
    here, there = reported(tmp_path / "here", ours), reported(tmp_path / "there", theirs)
    return verified(capsys, here, "--reference", there, *options)


def test_equal_runs_pass_in_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = compared(tmp_path, [record(gpu=H200)], [record(gpu=H200)], capsys)
    assert code == 0, text
    assert "step time: 0.208 s beside 0.208 s (ratio 1.000, no interval: fewer than three rounds," in text
    assert text.count("pass: ") == 3  # time, memory, loss
    assert "3 of 3 comparisons with the reference pass" in text


@pytest.mark.parametrize(("seconds", "tolerance", "code"), [
    (0.209, "5%", 0), (0.23, "5%", 1), (0.23, "0.2", 0), (0.18, "5%", 1),
])  # fmt: skip
def test_a_time_outside_of_the_tolerance_fails_whether_slower_or_faster(tmp_path, capsys, seconds, tolerance, code):
    found, text = compared(tmp_path, [record(seconds=seconds)], [record(seconds=0.2)], capsys, "--tolerance", tolerance)
    assert found == code, text
    assert ("fail: " in text) == bool(code)


def test_an_interval_that_reaches_the_tolerance_passes_and_one_beyond_it_fails(tmp_path, capsys):
    noisy, steady = (0.18, 0.21, 0.26), (0.2, 0.2001, 0.1999)
    code, text = compared(tmp_path / "a", [in_rounds(record(), *noisy)], [in_rounds(record(), *steady)], capsys)
    assert code == 0, text
    assert "95% interval" in text
    slow = in_rounds(record(), *(1.1 * one for one in steady))
    code, text = compared(tmp_path / "b", [slow], [in_rounds(record(), *steady)], capsys)
    assert code == 1, text


def test_another_loss_memory_status_or_gpu_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = record(gpu=H200, drift=0.2)
    assert other.measurement is not None
    other.measurement.peak_allocated_bytes = [30 << 30]
    code, text = compared(tmp_path / "a", [other], [record(gpu=H200)], capsys)
    assert code == 1
    assert "peak memory: 30 GiB beside 20 GiB (ratio 1.500" in text
    assert [line.split(":")[0] for line in text.splitlines()[:3]] == ["pass", "fail", "fail"]
    code, text = compared(tmp_path / "b", [record(status="oom")], [record()], capsys)
    assert (code, "status and GPU: oom on cpu beside ok on cpu" in text) == (1, True)
    code, text = compared(tmp_path / "c", [record(gpu=H200)], [record()], capsys)
    assert (code, f"ok on {H200} beside ok on cpu" in text) == (1, True)
    code, text = compared(tmp_path / "d", [record(status="oom")], [record(status="oom")], capsys)
    assert code == 0, text


def test_rows_without_a_partner_are_listed_and_fail_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = [record(), record(method="ring")], [record(), record(method="ulysses")]
    code, text = compared(tmp_path, ours, theirs, capsys)
    assert code == 0, text
    assert f"no partner: {ours[1].trial_id}: not in the reference" in text
    assert f"no partner: {theirs[1].trial_id}: only in the reference" in text


def test_runs_below_a_directory_have_partners_in_the_same_place(tmp_path, capsys):
    for root, second in (("here", 0.2), ("there", 0.3)):
        reported(tmp_path / root / "one", [record()])
        reported(tmp_path / root / "two", [record(seconds=second)])
    code, text = verified(capsys, tmp_path / "here", "--reference", tmp_path / "there", "--json")
    found = {one["run"]: [row["passed"] for row in one["compared"]] for one in json.loads(text)["runs"]}
    assert (code, found) == (1, {"one": [True, True], "two": [False, True]})


def test_an_archive_is_a_reference_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = reported(tmp_path / "run", [record()])
    assert main(["verify", "pack", str(run), "--out", str(tmp_path / "a.tar.gz")]) == 0
    assert verified(capsys, run, "--reference", tmp_path / "a.tar.gz")[0] == 0


def test_a_reference_of_other_trials_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = compared(tmp_path, [record()], [record(method="ring")], capsys)
    assert code == 2
    assert "holds no record of a trial that" in text


@pytest.mark.parametrize("tolerance", ["much", "-1%", "100%", "nan", ""])
def test_a_tolerance_is_a_share(tmp_path: Path, capsys: pytest.CaptureFixture[str], tolerance: str) -> None:
    code, text = verified(capsys, tmp_path, f"--tolerance={tolerance}", "--reference", tmp_path)
    assert code == 2
    assert "expected a share from 0 to below 1" in text


def test_a_tolerance_without_a_reference_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = verified(capsys, reported(tmp_path / "run", [record()]), "--tolerance", "1%")
    assert code == 2
    assert "found no --reference" in text
