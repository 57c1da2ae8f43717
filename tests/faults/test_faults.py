"""A fault at every point of a trial's life: nothing finished is lost, no number is wrong, nothing goes on running, and
the next command says what to do.

The matrix is data (matrix.py). `make test` tries one of its pairs, `make test-faults` all of them.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import signal
import statistics
from collections.abc import Collection
from pathlib import Path

import pytest

from harness.launch.ports import reserve_port
from tests.faults import inject, matrix
from tests.faults.command import EXPERIMENT, burst, failures, next_command, outcomes, records, started, status_of
from tests.faults.matrix import FAULTS, NETWORK, POINTS, QUICK, TRIALS, Fault
from tests.patience import scaled

RUN = Path("out", "run")
REASONS = {matrix.DISK.name: "No space left on device", matrix.PERMISSIONS.name: "Permission denied"}


def pairs() -> list:
    return [
        pytest.param(
            fault, point, ends,
            id=f"{fault.name}-{point}",
            marks=() if (fault.name, point) in QUICK else (pytest.mark.slow,),
        )
        for fault in FAULTS
        for point, ends in fault.possible().items()
    ]  # fmt: skip


def test_the_matrix_has_an_end_or_a_reason_for_every_pair():
    for fault in (*FAULTS, NETWORK):
        assert list(fault.ends) == list(POINTS), fault.name
        for point, ends in fault.possible().items():
            assert len(ends.split()) == len(TRIALS), (fault.name, point)
    tried = {(fault.name, point) for fault in FAULTS for point in fault.possible()}
    assert tried >= QUICK


@pytest.mark.parametrize(("fault", "point", "ends"), pairs())
def test_after_a_fault_what_is_finished_stays_and_the_next_command_goes_on(fault, point, ends, tmp_path, monkeypatch):
    if reason := inject.unavailable(fault):
        pytest.skip(reason)
    if fault.launcher == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray")
    monkeypatch.chdir(tmp_path)
    Path("exp.yaml").write_text(EXPERIMENT)
    RUN.parent.mkdir()
    arguments = ["run", "exp.yaml", "--out", str(RUN), "--order", "file"]
    port = None
    if fault.launcher == "ray":
        with reserve_port() as port:
            arguments += ["--ray", f"127.0.0.1:{port}"]
    if fault is matrix.STALL:
        arguments += ["--set", f"limits.start_seconds={scaled(15)}", "--set", f"limits.hang_seconds={scaled(4)}"]
    with inject.small_disk(fault, RUN.parent):
        if point == "import":  # of the fork server that a command starts, so an earlier one has finished something
            code, said = burst(tmp_path, *arguments, "--limit", "1", ray_port=port)
            assert code == 0, said
            arguments.append("--resume")
        with started(tmp_path, arguments, POINTS[point], inject.prefix(fault), port) as command:
            held = command.wait_for_hold()
            finished = records(RUN)
            with inject.happens(fault, POINTS[point], command, held, RUN):
                command.release()
                code = command.end()
                command.wait_until_gone()
            said = command.said()
        assert "Traceback" not in said, said
        assert code == expected_code(fault, ends), said
        if fault.name in REASONS:  # the run's last sentence names a file of it, and why it could not be written
            [sentence] = [line for line in said.splitlines() if line.startswith("burst: ")]
            assert f"{RUN}/" in sentence, said
            assert REASONS[fault.name] in sentence, said
        left = records(RUN)
        assert outcomes(left) == ends, said
        changed = [trial for trial, record in finished.items() if left.get(trial) != record]
        assert [status_of(left[trial]) for trial in changed] == (["torn"] if fault is matrix.TORN else [])
        kept = {trial: record for trial, record in left.items() if status_of(record) == "ok"}
        assert_no_number_is_wrong(kept.keys())

        if command_line := next_command(RUN):
            code, said = burst(tmp_path, *command_line[1:], ray_port=port)
            assert code == 0, said
        complete = records(RUN)
        assert outcomes(complete) == "ok ok ok ok", said
        assert [trial for trial, record in kept.items() if complete[trial] != record] == []
        assert failures(RUN) == []
        assert next_command(RUN) == []


def expected_code(fault: Fault, ends: str) -> int:
    """Exit code of the disturbed command: 0 where it never needed what it lost."""
    if fault is matrix.LAUNCHER:
        return -signal.SIGKILL
    if fault.name in REASONS:
        return 1
    return 0 if set(ends.split()) <= {"ok", "torn"} else 1


def assert_no_number_is_wrong(ok: Collection[str]) -> None:
    """Every record that says ok verifies. Rows of results.csv, where there is one, are whole and have these figures;
    those of the last records may be missing."""
    wrong = [failure for failure in failures(RUN) if failure["place"] in ok]
    assert [failure for failure in wrong if (failure["check"], failure["found"]) != ("results.csv", "no row")] == []
    if not (RUN / "results.csv").exists():
        return
    with open(RUN / "results.csv", newline="") as file:
        header, *rows = csv.reader(file)
    assert [row for row in rows if len(row) != len(header)] == []
    for row in (dict(zip(header, row, strict=True)) for row in rows):
        if row["trial_id"] in ok:
            steps = json.loads((RUN / "trials" / row["trial_id"] / "record.json").read_text())["measurement"]
            assert float(row["step_seconds_median"]) == statistics.median(steps["step_seconds"])
