"""Tables of a report: agreement, comparison, problems; and their Markdown, LaTeX and CSV forms."""

from __future__ import annotations

import csv
import io

import pytest

from engine.lora import Lora
from harness.records.record import Record
from harness.report.headline import headline_of
from harness.report.results import rows_of
from harness.report.tables.agreement import agreement_summary, agreement_table, agreements, relative_differences
from harness.report.tables.comparison import comparison_table
from harness.report.tables.table import Column, Table, escape_latex, significant, to_csv, to_latex, to_markdown
from harness.report.tables.trials import accuracy_table, problems_table, results_table, speed_by_length
from tests.harness.synthetic_records import cpu_sweep, gpu_sweep, record


def as_dicts(table: Table) -> list[dict[str, object]]:
    return [dict(zip((column.header for column in table.columns), row, strict=True)) for row in table.rows]


def test_relative_difference_is_symmetric_and_zero_for_equal_values() -> None:
    assert relative_differences([2.0, 0.0, 1.0], [4.0, 0.0, 1.0]) == [0.5, 0.0, 0.0]
    assert relative_differences([4.0], [2.0]) == relative_differences([2.0], [4.0])


def test_every_method_and_cp_size_is_held_against_one_reference() -> None:
    rows = rows_of(cpu_sweep())
    found = [pair for pair in agreements(rows) if pair.row["seq_len"] == 1024]
    assert {(pair.reference["method"], pair.reference["cp_size"]) for pair in found} == {("burst", 1)}
    assert len(found) == 8  # nine trials, one refused
    assert all(pair.agrees for pair in found)


def test_a_difference_in_any_step_breaks_the_agreement() -> None:
    trial = record(method="ulysses")
    assert trial.measurement is not None
    trial.measurement.loss[1] *= 1.001
    [_, pair] = agreements(rows_of([record(), trial]))
    assert pair.loss == pytest.approx(1e-3, rel=1e-2)
    assert pair.agrees is False


def test_a_gradient_norm_that_differs_breaks_the_agreement_too() -> None:
    trial = record(method="ulysses")
    assert trial.measurement is not None
    trial.measurement.grad_norm[-1] *= 1.001
    assert [pair.agrees for pair in agreements(rows_of([record(), trial]))] == [True, False]


@pytest.mark.parametrize("changes", [{"optimizer_states": "8bit"}, {"linear_dtype": "float8", "dtype": "bf16"}])
def test_what_rounds_further_has_a_plain_reference_and_no_verdict(changes: dict[str, str]) -> None:
    plain = record(dtype=changes.get("dtype", "fp32"), method="ulysses")
    narrow = record(**changes)
    assert narrow.measurement is not None
    narrow.measurement.loss[1] *= 1.001
    found = agreements(rows_of([narrow, plain]))
    assert [(pair.reference["method"], pair.row["method"]) for pair in found] == [
        ("ulysses", "burst"),
        ("ulysses", "ulysses"),
    ]
    assert found[0].agrees is None
    [alone] = agreements(rows_of([narrow]))
    assert alone.is_reference


def test_methods_are_put_beside_lengths_with_how_a_trial_ended_where_it_has_no_number() -> None:
    trials = [
        record(seq_len=1024),
        record(seq_len=2048, seconds=0.4),
        record(method="ring", seq_len=2048, status="oom"),
    ]
    table = speed_by_length(rows_of(trials))
    assert table is not None
    burst, ring = as_dicts(table)
    assert burst["1k"] == pytest.approx(trials_speed(trials[0]))
    assert burst["2k"] == pytest.approx(trials_speed(trials[1]))
    assert (ring.get("1k"), ring["2k"], ring["method"]) == (None, "oom", "ring")
    assert r"1k & 2k" in to_latex(table)
    assert speed_by_length(rows_of(trials[:1])) is None  # one length is a list of methods, which other tables are


def trials_speed(trial: Record) -> float:
    [row] = rows_of([trial])
    return float(row["tokens_per_gpu_per_second"])


def test_models_and_masks_have_a_column_where_there_are_several() -> None:
    one = results_table(rows_of([record(), record(seq_len=2048)]))
    assert {"model", "mask"} & {column.header for column in one.columns} == set()
    lines = as_dicts(results_table(rows_of([record(), record(mask="full", dtype="fp64")])))
    assert {(line["model"], line["mask"]) for line in lines} == {("small fp32", "causal"), ("small fp64", "full")}


def test_trials_that_compute_something_else_are_not_compared() -> None:
    others = [record(seed=1), record(mask="full"), record(batch_size=2), record(dtype="fp64"), record(seq_len=2048)]
    others += [record(lora=Lora(rank=4, alpha=8, targets=("q", "v")))]
    others += [record(mask="documents", packing=packing) for packing in ("best_fit", "greedy")]
    others += [record(mask="documents", longer_documents="drop")]
    assert all(pair.row is pair.reference for pair in agreements(rows_of([record(), *others])))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_system_that_starts_from_weights_of_its_own_is_not_compared_by_loss(dtype) -> None:
    ours = [record(dtype=dtype), record(dtype=dtype, method="ring")]
    foreign = record(dtype=dtype, method="megatron_lm_upstream", drift=0.3)
    rows = rows_of([*ours, foreign])
    assert {pair.row["method"] for pair in agreements(rows)} == {"burst", "ring"}
    told = " ".join(headline_of(rows).sentences)
    assert ("compute the same thing" in told) is (dtype == "fp32")
    assert told.count("megatron_lm_upstream starts from weights of its own; its loss is not compared.") == 1
    assert "e-01" not in told
    assert "weights of its own" not in " ".join(headline_of(rows_of(ours)).sentences)


def test_the_same_batch_spread_over_replicas_or_micro_batches_is_compared() -> None:
    spread = [record(batch_size=1, world_size=2), record(batch_size=1, gradient_accumulation=2)]
    found = agreements(rows_of([record(batch_size=2), *spread]))
    assert len(found) == 3
    assert {pair.reference["trial_id"] for pair in found} == {found[0].row["trial_id"]}


def test_a_trial_that_nothing_is_held_against_has_no_line() -> None:
    assert agreement_table(rows_of([record(), record(seq_len=2048)])) is None
    table = agreement_table(rows_of([record(), record(method="ring"), record(seq_len=2048)]))
    assert table is not None
    assert [line["tokens"] for line in as_dicts(table)] == [1024, 1024]


def test_bf16_is_shown_without_a_verdict() -> None:
    table = agreement_table(rows_of([record(dtype="bf16"), record(dtype="bf16", method="ring", drift=0.01)]))
    assert table is not None
    assert [line["verdict"] for line in as_dicts(table)] == ["reference", "not compared"]
    assert not table.marked


def test_a_disagreement_is_marked_and_leads_the_summary() -> None:
    rows = rows_of([record(), record(method="ring", drift=5e-4)])
    table = agreement_table(rows)
    assert table is not None
    assert table.marked == {1}
    assert as_dicts(table)[1]["verdict"] == "differs"
    assert "1 of 1 trials do not compute the same thing" in " ".join(headline_of(rows).sentences)


def test_every_trial_without_a_number_is_listed_with_its_reason() -> None:
    table = problems_table(rows_of(cpu_sweep()))
    assert table is not None
    assert {(line["status"], line["reason"]) for line in as_dicts(table)} == {
        ("refused", "4 KV heads do not split into 8 ranks; choose a cp_size that divides them"),
        ("oom", "rank 2 ran out of memory allocating 3.1 GiB"),
        ("timeout", "no end after 60 s; raise limits.trial_seconds"),
    }
    assert problems_table(rows_of([record()])) is None


def test_errors_against_float64_are_tabled_where_they_were_measured() -> None:
    table = accuracy_table(rows_of([record(task="attention"), record()]))
    assert table is not None
    assert [line["dq error"] for line in as_dicts(table)] == [3e-7]


def test_columns_nobody_filled_are_left_out_of_the_printed_table() -> None:
    headers = {column.header for column in results_table(rows_of(cpu_sweep())).columns}
    assert "MFU %" not in headers
    assert {"tok/s/rank", "reason"} <= headers  # ranks on a CPU are no GPUs
    assert "tok/s/GPU" in {column.header for column in results_table(rows_of(gpu_sweep())).columns}


def test_what_the_methods_compute_is_summed_up_in_a_line_for_each() -> None:
    table = agreement_summary(rows_of(cpu_sweep()))
    assert table is not None
    lines = {(line["method"], line["task"]): line for line in as_dicts(table)}
    assert len(lines) == 6
    assert lines["ulysses", "train"]["loss"] == pytest.approx(1e-6, rel=0.5)
    assert lines["ulysses", "attention"]["dq"] == lines["ulysses", "attention"]["differs by"] == 3e-7
    assert agreement_summary(rows_of([record()])) is None


def test_varying_settings_are_part_of_the_name() -> None:
    rows = rows_of([record(schedule="ring"), record(schedule="double_ring")])
    assert [line["method"] for line in as_dicts(results_table(rows))] == [
        "burst, schedule double_ring",
        "burst, schedule ring",
    ]


HOSTILE = Table(
    name="hostile",
    title="50% of $x_1$ & <more>",
    columns=(Column(header="text"), Column(header="number", numeric=True, form=significant(3))),
    rows=((r"a|b\c {d} ~ ^ # *e* <script>", 1234.5678), ("line\nbreak", None)),
)


def test_latex_escapes_every_special_character() -> None:
    assert escape_latex("\\&%$#_{}~^") == (r"\textbackslash{}\&\%\$\#\_\{\}\textasciitilde{}\textasciicircum{}")
    text = to_latex(HOSTILE)
    assert r"\caption{50\% of \$x\_1\$ \& \textless{}more\textgreater{}}" in text
    assert r"  line break &  \\" in text.splitlines()


def test_latex_of_our_own_notes_is_pure_ascii() -> None:
    rows = rows_of(cpu_sweep())
    tables = [results_table(rows), comparison_table(rows), agreement_table(rows), accuracy_table(rows)]
    assert all(table is not None and to_latex(table).isascii() for table in tables)


def test_markdown_keeps_one_line_per_row_and_escapes_bars() -> None:
    lines = to_markdown(HOSTILE).splitlines()
    assert lines[3] == "| --- | ---: |"
    assert lines[4] == r"| a\|b\\c {d} ~ ^ # \*e\* \<script> | 1,235 |"
    assert lines[5] == "| line break |  |"


def test_csv_keeps_full_precision_and_empty_cells() -> None:
    [header, first, second] = csv.reader(io.StringIO(to_csv(HOSTILE)))
    assert header == ["text", "number"]
    assert first[1] == "1234.5678"
    assert second == ["line\nbreak", ""]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234567.8, "1,234,568"), (12.345, "12.3"), (0.012345, "0.0123"), (99.96, "100"), (4.0, "4.00")],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert significant(3)(value) == text
