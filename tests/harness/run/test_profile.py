"""`burst run --profile`: traces and a table in real processes; test_cli_end_to_end.py finds none without it."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from harness.cli import main
from harness.report.page import report_tables
from harness.report.results import rows_of
from harness.report.tables.particular import HEADERS, breakdown_table
from harness.run.directory import RunDirectory
from tests.harness.synthetic_records import record

EXPERIMENT = """\
title: A short sequence over two ranks
task: [train, attention]
model: tiny
fixed: {method: burst, seq_len: 128, cp_size: 2, dtype: fp32}
steps: {warmup: 1, measured: 2}
limits: {trial_seconds: 300}
"""


def run(out: str, *flags: str) -> list[dict[str, str]]:
    """The rows of results.csv after `burst run`."""
    assert main(["run", "exp.yaml", "--launcher", "local", "--out", out, *flags]) == 0
    with open(Path(out, "results.csv"), newline="") as file:
        return list(csv.DictReader(file))


def test_a_profiled_run_leaves_traces_and_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    profiled = run("profiled", "--profile")
    assert len(profiled) == 2

    for row in profiled:
        trace = tmp_path / "profiled" / "trials" / row["trial_id"] / "trace.json.gz"
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        seconds = [float(value) for name, value in row.items() if name.startswith("extra_profile.seconds.")]
        assert len(seconds) == len(HEADERS)
        assert sum(seconds) == pytest.approx(float(row["extra_profile.span_seconds"]))
        assert row["extra_profile.of"] == "extra_step"
    for kind in ("md", "csv", "tex"):
        assert (tmp_path / "profiled" / "tables" / f"breakdown.{kind}").exists()
    assert "Where a step&#39;s time goes" in (tmp_path / "profiled" / "report.html").read_text()

    assert run("profiled", "--resume") == profiled  # what is finished is kept with or without a trace
    assert RunDirectory(tmp_path / "profiled").description()["trials"]


def test_the_table_has_the_shares_of_what_was_met_and_no_line_for_other_trials() -> None:
    trial, unseen, other = record(gpu="NVIDIA H200", dtype="bf16"), record(seq_len=2048), record(seq_len=4096)
    assert trial.measurement is not None
    assert unseen.measurement is not None
    seconds = dict.fromkeys(HEADERS, 0.0) | {"attention_forward": 0.06, "matmul": 0.03, "idle": 0.01}
    trial.measurement.extra["profile"] = {
        "of": "measured_step", "on": "gpu", "rank": 3, "span_seconds": 0.1, "seconds": seconds,
    }  # fmt: skip
    unseen.measurement.extra["profile"] = {"of": "extra_step", "reason": "the profiler saw nothing run"}
    rows = rows_of([trial, unseen, other])
    table = breakdown_table(rows)
    assert table is not None
    assert table.name in [each.name for each in report_tables(rows)]
    [line] = [dict(zip((column.header for column in table.columns), row, strict=True)) for row in table.rows]
    assert [name for name in line if name.endswith("%")] == ["attention forward %", "matmul %", "idle %"]
    assert (line["attention forward %"], line["of rank"], line["traced step"]) == (0.6, 3, "the measured one")
    assert (line["model"].endswith(" bf16"), "mask" in line) == (True, False)
    assert table.texts()[0][-3:] == ["60.0", "30.0", "10.0"]


def test_there_is_no_table_without_a_profile() -> None:
    assert breakdown_table(rows_of([record()])) is None


def test_the_table_knows_every_category_in_its_order() -> None:
    from engine.profile.breakdown import CATEGORIES

    assert tuple(HEADERS) == CATEGORIES
