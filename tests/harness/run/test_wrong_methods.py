"""A method that computes something else than attention has no result: end to end, with methods brought from outside."""

import csv
import json
import re
from pathlib import Path

import pytest

from harness.cli import main
from harness.records.record import Record
from harness.records.stored import read_records
from harness.report.headline import headline_of, wrong_sentences
from harness.report.page import figures_of, report_tables
from harness.report.results import rows_of
from harness.spec import methods
from tests.harness.report.figures.drawn import said
from tests.harness.run.wrong_method import NO_TILE, RIGHT, SCALED, SHIFTED, OwnMethod
from tests.once import made_once

SHORT, LONG = 1024, 4608  # the longer one is compared by a sample of rows
METHODS = (RIGHT, NO_TILE, SCALED, SHIFTED)
EXPERIMENT = f"""
title: Own methods
task: attention
model: {{name: own, layers: 1, hidden: 16, ffn: 32, heads: 1, kv_heads: 1, head_dim: 16, vocab: 32}}
sweep:
  method: [{", ".join(METHODS)}]
  seq_len: [{SHORT}, {LONG}]
  dtype: [fp32, bf16]
exclude:
  - {{seq_len: {SHORT}, dtype: bf16}}
  - {{method: [{NO_TILE}, {SCALED}, {SHIFTED}], seq_len: {LONG}, dtype: fp32}}
fixed: {{cp_size: 2, mask: causal}}
steps: {{warmup: 0, measured: 1}}
"""


def ran(place: Path, experiment: str, *typed: str) -> int:
    """The exit code of a run of own methods into PLACE/run."""
    (place / "own.yaml").write_text(experiment, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        registry = methods._registry() | {name: ("tests.harness.run.wrong_method", OwnMethod(name)) for name in METHODS}
        patch.setattr(methods, "_registry", lambda: registry)
        return main(["run", str(place / "own.yaml"), "--out", str(place / "run"), "--order", "file", *typed])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all methods, which ends with exit code 1."""

    def make(place: Path) -> None:
        assert ran(place, EXPERIMENT) == 1

    return made_once(tmp_path_factory, "wrong-methods", make) / "run"


@pytest.fixture(scope="module")
def records(run_dir: Path) -> list[Record]:
    return read_records(run_dir)


def of(records: list[Record], method: str) -> list[Record]:
    found = [record for record in records if record.settings.method == method]
    assert len(found) == (3 if method == RIGHT else 2)
    return found


def assert_right(records: list[Record]) -> None:
    for record in records:
        assert (record.status, record.reason) == ("ok", ""), record.trial_id
        assert record.measurement is not None
        rows = record.measurement.extra.get("checked", {}).get("rows")
        assert (rows is None) == (record.settings.seq_len == SHORT)


def test_a_right_method_is_ok_where_all_rows_are_compared_and_where_a_sample_is(records: list[Record]) -> None:
    assert_right(of(records, RIGHT))


@pytest.mark.slow
def test_a_right_method_is_ok_in_bf16_where_all_rows_are_compared(tmp_path: Path) -> None:
    experiment = EXPERIMENT.replace(", ".join(METHODS), RIGHT).partition("exclude:")[0] + "fixed: {cp_size: 2}\n"
    assert ran(tmp_path, experiment, "--set", f"sweep.seq_len=[{SHORT}]", "--set", "sweep.dtype=[bf16]") == 0
    [record] = read_records(tmp_path / "run")
    assert (record.settings.seq_len, record.settings.dtype) == (SHORT, "bf16")
    assert_right([record])


@pytest.mark.parametrize(
    ("method", "tensors", "place"),
    [
        (NO_TILE, "out|dq|dk|dv", "rank 1, tokens (256|1152) to (767|3455)|rank 0, tokens 0 to (255|1151)"),
        (SCALED, "dk", r"rank [01], tokens \d+ to \d+"),
        (SHIFTED, "out|dq|dk|dv", r"rank [01], tokens? \d+( to \d+)?(, head \d+)?"),
    ],
)
def test_a_wrong_method_is_wrong_with_tensor_bound_rank_and_tokens(records, method, tensors, place):
    for record in of(records, method):
        assert record.status == "wrong", (record.trial_id, record.measurement and record.measurement.extra)
        bound = "1e-05|4e-05" if record.settings.dtype == "fp32" else r"0\.008|0\.032"
        assert re.match(
            rf"{method}: ({tensors}) differs from float64 by [\d.e+-]+(, expected at most ({bound}); most on ({place})"
            rf"| on ({place}), expected at most ({bound}))",
            record.reason,
        ), record.reason
        assert record.measurement is not None
        assert record.measurement.step_seconds  # kept, and counted nowhere


@pytest.mark.slow
def test_a_scaled_gradient_is_wrong_in_a_training_trial_too(tmp_path: Path) -> None:
    """The small step of the trial finds it, though losses and gradient norms hardly differ."""
    shape = "heads: 4, kv_heads: 4, head_dim: 8, vocab: 256}"
    assert (
        ran(
            tmp_path,
            "task: train\n"
            f"model: {{name: own, layers: 2, hidden: 32, ffn: 48, {shape}\n"
            f"sweep: {{method: [{RIGHT}, {SCALED}], dtype: [fp32, bf16]}}\n"
            "fixed: {cp_size: 2, seq_len: 512, mask: causal}\nsteps: {warmup: 0, measured: 1}\n",
        )
        == 1
    )
    for record in read_records(tmp_path / "run"):
        if record.settings.method == RIGHT:
            assert (record.status, record.reason) == ("ok", "")
        else:
            assert record.status == "wrong"
            assert re.search(r"the gradient of blocks\.\d\.attention\.k\.weight is 1\.02\d* times", record.reason)


def test_a_wrong_trial_has_no_number_no_rank_and_no_place_in_a_figure(run_dir: Path, records: list[Record]) -> None:
    rows = rows_of(records)
    for row in rows:
        if row["method"] == RIGHT:
            continue
        assert row["step_seconds_median"] is None
        assert row["tflops_per_gpu"] is None
        assert row["step_seconds_by_round"] == []
        assert row["extra_error.out"] is not None
    told = " ".join(headline_of(rows).sentences)
    assert not any(method in told for method in (NO_TILE, SCALED, SHIFTED))
    assert "6 wrong" in told
    assert "Attention and its gradients differ from a dense float64 run by at most" in told
    assert len(wrong_sentences(rows)) == 6
    plots, _ = figures_of(rows)
    assert plots
    for plot in plots:
        assert not any(method in said(plot.figure) for method in (NO_TILE, SCALED, SHIFTED, "wrong"))
    tables = {table.name: table for table in report_tables(rows)}
    assert len(tables["problems"].rows) == 6
    assert all("differs from float64" in str(line) for line in tables["problems"].rows)
    assert len(tables["accuracy"].rows) == 3
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert 'class="wrong-trials"' in page
    with open(run_dir / "results.csv", newline="", encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["status"] == "wrong"]
    assert len(lines) == 6
    assert not any(line["step_seconds_median"] for line in lines)


def test_every_command_that_reads_the_run_says_so(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run_dir)]) == 1
    said = capsys.readouterr().out
    assert said.count("expected no wrong trial") == 6
    assert main(["compare", str(run_dir), "--methods", RIGHT, SCALED]) == 1
    said = capsys.readouterr().out
    assert said.count("Wrong in B: ") == 2
    assert f"{SCALED}: dk differs from float64" in said
    assert main(["compare", str(run_dir), "--methods", SCALED, RIGHT]) == 1  # a wrong reference is no reference
    assert "Wrong in A: " in capsys.readouterr().out
    assert main(["compare", str(run_dir), "--methods", NO_TILE, SCALED, "--json"]) == 1
    assert [one["side"] for one in json.loads(capsys.readouterr().out)["wrong"]] == ["A"] * 2 + ["B"] * 2
    main(["status", str(run_dir)])
    said = capsys.readouterr().out
    assert "6 wrong" in said
    assert f"{SCALED}: dk differs from float64" in said
    assert "--retry-failed" in said
