"""Reports of trials whose set-ups came from the table: what is compared, how series are named, what is printed."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.settings import Checkpoint
from harness.cli import main
from harness.compare.pairs import ComparedRecord, compare
from harness.records.record import Record, RecordPlace
from harness.records.stored import read_records
from harness.report.page import report_tables
from harness.report.results import columns_of, row_of, rows_of
from harness.report.speedup import contested_points
from harness.report.tables.particular import set_ups_table
from harness.report.variants import series_of, setup_name, varying_settings
from tests.harness.run.test_run_experiment import ScriptedLauncher
from tests.harness.synthetic_records import H200, LARGE, around, record

MEGATRON = {"checkpoint": Checkpoint(tail=0.0), "lm_head_fusion": False}
BURST = {"checkpoint": Checkpoint(tail=0.5), "schedule": "double_ring"}


def published(method: str, seconds: float = 1.0, by_hand: tuple[str, ...] = (), **changes: Any) -> Record:
    """A trial as published: of these changes, all came from the table."""
    one = record(
        method=method, settings="as_published", model=LARGE, dtype="bf16", gpu=H200, cp_size=4, seq_len=65536,
        rounds=around(seconds), **changes,
    )  # fmt: skip
    names = [name for key in changes for name in ("checkpoint.tail" if key == "checkpoint" else key,)]
    return replace(
        one,
        settings_from_table=sorted({*names} - {*by_hand}),
        settings_by_hand=sorted(by_hand),
        settings_notes=[f"A note about {method}."],
    )


def equal(method: str, seconds: float = 1.0, **changes: Any) -> Record:
    return record(
        method=method, model=LARGE, dtype="bf16", gpu=H200, cp_size=4, seq_len=65536, rounds=around(seconds), **changes
    )


def test_methods_as_published_are_compared_although_their_settings_differ() -> None:
    rows = rows_of([published("burst", 1.0, **BURST), published("megatron_cp", 1.3, **MEGATRON)])
    [point] = contested_points(rows)
    found = point.speedup("burst", "megatron_cp")
    assert found is not None
    assert round(found.value, 2) == 1.3


def test_methods_with_equal_settings_are_compared_only_where_these_are_equal() -> None:
    assert contested_points(rows_of([equal("burst", **BURST), equal("megatron_cp", **MEGATRON)])) == []


def test_set_ups_of_different_names_are_never_compared() -> None:
    rows = rows_of([equal("burst"), published("megatron_cp", **MEGATRON)])
    assert contested_points(rows) == []


def test_values_set_by_hand_stay_part_of_what_must_be_equal() -> None:
    tails = ("checkpoint.tail",)
    rows = rows_of(
        published(method, by_hand=tails, checkpoint=Checkpoint(tail=tail))
        for method in ("burst", "megatron_cp")
        for tail in (0.0, 1.0)
    )
    points = contested_points(rows)
    assert sorted(point.first["checkpoint.tail"] for point in points) == [0.0, 1.0]
    assert varying_settings(rows) == ["checkpoint.tail"]


def test_what_the_planner_chose_differs_by_method_and_is_compared_all_the_same() -> None:
    names = "checkpoint.every checkpoint.whole_layers"
    planned = [
        equal(method, planned=names, checkpoint=Checkpoint(plan="auto", every=1, whole_layers=layers))
        for method, layers in (("burst", 4), ("megatron_cp", 2))
    ]
    [point] = contested_points(rows_of(planned))
    assert set(point.by_method) == {"burst", "megatron_cp"}


def test_a_real_system_which_has_no_planner_is_compared_with_what_ours_planned() -> None:
    plan = ("checkpoint.plan",)
    planned = Checkpoint(plan="auto", every=0)
    trials = [
        published("burst", by_hand=plan, checkpoint=planned, planned="checkpoint.every"),
        published("burst", by_hand=plan, checkpoint=Checkpoint(every=1)),
        published("torchtitan_upstream", by_hand=plan, checkpoint=Checkpoint(every=1)),
    ]
    [point] = contested_points(rows_of(trials))
    assert [row["checkpoint.plan"] for row in point.by_method["burst"]] == ["auto"]


def test_a_series_is_named_by_its_set_up_and_not_by_every_value_of_it() -> None:
    rows = rows_of([equal("burst"), published("burst", **BURST), equal("ulysses"), published("ulysses", **MEGATRON)])
    assert [name for name, _ in series_of(rows)] == [
        "burst, as published", "burst, equal settings", "ulysses, as published", "ulysses, equal settings",
    ]  # fmt: skip


def test_a_set_up_that_all_trials_share_stands_in_the_title() -> None:
    rows = rows_of([published("burst", **BURST), published("ulysses", **MEGATRON)])
    assert [name for name, _ in series_of(rows)] == ["burst", "ulysses"]
    assert setup_name(rows).endswith("settings as_published")
    assert "settings" not in setup_name(rows_of([equal("burst")]))


def test_results_have_the_column_and_what_the_table_gave() -> None:
    rows = rows_of([equal("burst"), published("megatron_cp", by_hand=("lm_head_fusion",), **MEGATRON)])
    assert [row["settings"] for row in rows] == ["equal", "as_published"]
    assert rows[1]["settings_from_table"] == "checkpoint.tail"
    assert rows[1]["settings_by_hand"] == "lm_head_fusion"
    assert {"settings", "settings_from_table", "settings_by_hand", "settings_notes"} <= set(columns_of(rows))
    assert "settings_from_table" not in columns_of(rows[:1])


def test_a_report_prints_what_the_table_gave_and_what_no_setting_says() -> None:
    rows = rows_of([published("burst", **BURST), published("megatron_cp", by_hand=("lm_head_fusion",), **MEGATRON)])
    table = next(table for table in report_tables(rows) if table.name == "settings")
    assert table.rows == (
        ("burst", "as_published", "checkpoint.tail 0.5, schedule double_ring", None, "A note about burst."),
        ("megatron_cp", "as_published", "checkpoint.tail 0.0", "lm_head_fusion", "A note about megatron_cp."),
    )
    assert set_ups_table(rows_of([equal("burst")])) is None


def test_compare_pairs_methods_as_published() -> None:
    def member(one: Record) -> ComparedRecord:
        return ComparedRecord(
            run=Path("run"), place=RecordPlace(Path(one.trial_id)), record=one, row=row_of(one, "run")
        )

    pairs = compare(
        ("burst", "megatron_cp"),
        [member(published("burst", **BURST))],
        [member(published("megatron_cp", 1.3, **MEGATRON))],
        tolerance=0.02,
        across=["method"],
        one_run=True,
    ).pairs
    assert [round(pair.times.value, 2) for pair in pairs if pair.times] == [1.3]


def test_a_run_leaves_what_the_table_gave_in_record_results_and_report(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.launch.supervisor.LocalLauncher", lambda: ScriptedLauncher({}))
    path, out = tmp_path / "question.yaml", tmp_path / "run"
    path.write_text(
        "task: attention\nmodel: tiny\nsteps: {warmup: 0, measured: 1}\n"
        "fixed: {method: ulysses, settings: as_published, seq_len: 64, dtype: fp32, optimizer_offload: false}\n",
        encoding="utf-8",
    )
    assert main(["run", str(path), "--launcher", "local", "--out", str(out)]) == 0
    [one] = read_records(out)
    assert one.settings.settings == "as_published"
    assert (one.settings.schedule, one.settings.optimizer_offload) == ("ulysses", False)
    assert "schedule" in one.settings_from_table
    assert one.settings_by_hand == ["optimizer_offload"]
    assert any("ratio 0.8" in note for note in one.settings_notes)
    with open(out / "results.csv", encoding="utf-8", newline="") as file:
        [row] = csv.DictReader(file)
    assert (row["settings"], row["settings_by_hand"]) == ("as_published", "optimizer_offload")
    assert "ratio 0.8" in (out / "tables" / "settings.md").read_text(encoding="utf-8")
