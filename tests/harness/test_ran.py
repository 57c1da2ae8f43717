"""What a trial ran is said in words wherever the trial is shown."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from engine.settings import Steps
from harness.cli import main
from harness.records.record import Record, write_record
from harness.report.drawing.looks import looks_of
from harness.report.headline import summary_sentences
from harness.report.page import TABLES, report_tables, terminal_table
from harness.report.results import row_of, rows_of, write_results
from harness.report.tables.comparison import comparison_table
from harness.report.tables.masks import mask_table
from harness.report.tables.table import to_markdown
from harness.report.tables.trials import series_names
from harness.report.variants import series_of
from tests.harness.synthetic_records import H200, record

RING = {"schedule": "ring", "backward": "query", "exchange": "relay"}
RING_KEYS = RING | {"backward": "key_value"}
DOUBLE = RING | {"schedule": "double_ring"}
COPIED = {"schedule": "ulysses", "backward": "copy_engine", "exchange": "copy_engine"}
SENT = {"schedule": "ulysses", "backward": "all_to_all", "exchange": "all_to_all"}
USP = {"schedule": "usp", "backward": "query", "exchange": "copy_engine + relay"}
ACROSS = {"schedule": "usp_transposed", "backward": "key_value", "exchange": "all_to_all + copy_engine"}


def ran(chosen: dict[str, str], **changes: object) -> Record:
    """A record of a trial whose attention became `chosen`."""
    trial = record(**({"cp_size": 4} | changes))  # type: ignore[arg-type]
    if trial.measurement is not None:
        trial.measurement.chosen |= chosen
    return trial


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (RING, "ring, query side"),
        (RING_KEYS, "ring, key side"),
        (DOUBLE, "double ring, query side"),
        (COPIED, "ulysses, copy engine"),
        (SENT, "ulysses, all-to-all"),
        (USP, "usp, copy engine, query side"),
        (ACROSS, "usp transposed, all-to-all, key side"),
        ({"schedule": "all_gather"}, "all gather"),  # of a contributed method
        ({}, None),  # a task without attention
    ],
)
def test_a_row_says_in_words_what_the_trial_ran(chosen, words) -> None:
    assert row_of(ran(chosen))["ran"] == words


def test_a_compared_system_is_named_with_its_release_and_with_other_builds() -> None:
    trial = ran({}, method="megatron_lm_upstream")
    assert trial.measurement is not None
    words = "2.12.0, another build: compiled -O1 (archive 0123456789ab)"
    builds = {"transformer-engine-torch": words, "transformer-engine": words, "ninja": "1.0, another build: mine"}
    trial.measurement.extra["upstream"] = {"release": "megatron-core 0.19.2", "builds": builds}
    said = (
        "megatron-core 0.19.2, ninja 1.0, another build: mine, transformer-engine 2.12.0, another build: compiled -O1"
    )
    assert row_of(trial)["ran"] == said
    [(name, _)] = series_of(rows_of([trial]))
    assert name == f"megatron_lm_upstream ({said})"


def test_an_attention_function_is_named_with_what_it_sent_and_its_kernel() -> None:
    trial = ran({"arrangement": "ulysses 2 x ring 2", "kernel": "fa4", "schedule": "usp"}, method="yunchang_upstream")
    assert trial.measurement is not None
    trial.measurement.extra["upstream"] = {"release": "yunchang 0.6.4"}
    assert row_of(trial)["ran"] == "yunchang 0.6.4, ulysses 2 x ring 2 over fa4"


def test_one_rank_shares_nothing_and_a_trial_without_a_measurement_ran_nothing(tmp_path: Path) -> None:
    rows = rows_of([ran(RING, cp_size=1), ran(RING, status="oom")])
    with open(write_results(tmp_path / "results.csv", rows), newline="") as file:
        assert [(row["status"], row["ran"]) for row in csv.DictReader(file)] == [("ok", "one rank"), ("oom", "")]


@pytest.mark.parametrize(
    ("trial", "name"),
    [
        (ran(RING, schedule="ring"), "burst (ring, query side)"),
        (ran(DOUBLE, schedule="double_ring"), "burst (double ring, query side)"),
        (ran(COPIED), "burst (auto: ulysses, copy engine)"),
        (ran(COPIED, schedule="ulysses"), "burst (ulysses, copy engine)"),
        (ran(SENT, method="ulysses"), "ulysses (all-to-all)"),
        (ran(RING_KEYS, method="ring"), "ring (key side)"),
        (ran(RING_KEYS, method="megatron_cp"), "megatron_cp (ring, key side)"),
        (ran(RING_KEYS, method="loongtrain_double_ring"), "loongtrain_double_ring (ring, key side)"),
        (ran(DOUBLE, method="loongtrain_double_ring"), "loongtrain_double_ring (query side)"),
        (ran(USP, method="loongtrain_usp"), "loongtrain_usp (copy engine, query side)"),
        (ran(RING, cp_size=1), "burst"),
        (ran(RING, status="oom"), "burst"),
    ],
)  # fmt: skip
def test_a_series_is_named_by_its_method_and_what_it_ran(trial, name) -> None:
    assert series_names(rows_of([trial])) == [name]


def test_settings_that_the_name_says_are_not_repeated_and_others_tell_rows_apart() -> None:
    trials = [
        ran(RING, schedule="ring"),
        ran(RING),
        ran(RING, schedule="double_ring"),  # on one node
        ran(RING, schedule="ring", backward="query"),
        ran(RING, kernel="cudnn"),
        ran(RING, cp_size=1),
        ran(RING, cp_size=1, schedule="ring"),
    ]
    names = series_names(rows_of(trials))
    assert len(set(names)) == len(trials), names
    assert "burst (auto: ring, query side), backward auto, kernel auto" in names
    assert "burst (ring, query side), backward auto, kernel auto, schedule double_ring" in names
    assert "burst (ring, query side), kernel auto" in names


def test_steps_warm_up_and_seeds_are_no_part_of_a_name() -> None:
    trials = [ran(COPIED, seed=seed, steps=Steps(warmup=seed, measured=3 + seed)) for seed in range(2)]
    assert series_names(rows_of(trials)) == ["burst (auto: ulysses, copy engine)"] * 2


def test_no_two_choices_of_settings_share_a_name() -> None:
    trials = [
        ran(
            chosen,
            schedule=schedule,
            backward=backward,
            kernel=kernel,
            data=data,
            status=status,
            steps=steps,
            seed=seed,
        )
        for chosen in (RING, RING_KEYS, COPIED)
        for schedule in ("auto", "ring", "ulysses")
        for backward in ("auto", "query", "key_value")
        for kernel in ("auto", "cpu")
        for data in ("a/book.txt", "b/book.txt", "book.txt")
        for status in ("ok", "oom")
        for steps, seed in ((Steps(measured=3), 0), (Steps(measured=5), 1))
    ]
    rows = rows_of(trials)
    choices: dict[str, set[tuple[object, ...]]] = {}
    for name, members in series_of(rows):
        choices[name] = {(row["schedule"], row["backward"], row["kernel"], row["data"]) for row in members}
        assert not any(word in name for word in ("measured", "warmup", "seed", "round"))
    assert {len(found) for found in choices.values()} == {1}
    assert sum(len(members) for _, members in series_of(rows)) == len(trials)


def test_a_figure_shows_a_trial_without_a_number_among_those_of_its_settings() -> None:
    trials = [
        ran(COPIED, seq_len=1024),
        ran(COPIED, seq_len=2048, status="oom"),
        ran(RING, seq_len=1024, cp_size=1),
        ran(SENT, method="ulysses"),
    ]
    series = series_of(rows_of(trials))
    assert [(name, len(rows)) for name, rows in series] == [
        ("burst (auto: ulysses, copy engine)", 3), ("ulysses (all-to-all)", 1),
    ]  # fmt: skip
    assert {look.hatch for look in looks_of(series).values()} == {""}


def test_what_auto_took_at_different_lengths_is_two_series_that_look_different() -> None:
    trials = [ran(COPIED, seq_len=2048), ran(RING, seq_len=1024), ran({}, seq_len=4096, status="oom")]
    series = series_of(rows_of(trials))
    assert [name for name, _ in series] == [
        "burst", "burst (auto: ring, query side)", "burst (auto: ulysses, copy engine)",
    ]  # fmt: skip
    looks = looks_of(series)
    assert looks["burst (auto: ring, query side)"] != looks["burst (auto: ulysses, copy engine)"]


def test_every_table_and_sentence_that_shows_a_trial_says_what_it_ran() -> None:
    changes = {"gpu": H200, "dtype": "bf16", "task": "attention"}
    trials = [
        ran(RING, cp_size=1, **changes),
        ran(COPIED, seconds=0.1, **changes),
        ran(SENT, method="ulysses", **changes),
        ran(COPIED, mask="full", **changes),
    ]
    rows = rows_of(trials)
    tables = {table.name: to_markdown(table) for table in report_tables(rows)}
    for name in ("results", "ideal", "masks"):
        assert "burst (auto: ulysses, copy engine)" in tables[name], name
    assert mask_table(rows) is not None
    assert "burst ran: ulysses, copy engine. ulysses ran: ulysses, all-to-all." in tables["comparison"]
    sentence = next(one for one in summary_sentences(rows) if one.startswith("Attention"))
    assert "burst (auto: ulysses, copy engine), " in sentence
    assert "the speed of ulysses (all-to-all)" in sentence
    cells = list(terminal_table(rows).columns[0].cells)
    assert {str(cell) for cell in cells} == {"burst", "burst (auto: ulysses, copy engine)", "ulysses (all-to-all)"}
    assert set(tables) <= TABLES.keys()


def test_a_comparison_has_a_column_for_a_method_that_ran_several_things() -> None:
    trials = []
    for seq_len, chosen in ((1024, RING), (2048, COPIED)):
        trials += [ran(chosen, seq_len=seq_len), ran(SENT, method="ulysses", seq_len=seq_len)]
    table = comparison_table(rows_of(trials))
    assert table is not None
    at = [column.header for column in table.columns].index("burst ran")
    assert [row[at] for row in table.rows] == ["ring, query side", "ulysses, copy engine"]


# Baselines.


def of_speed(method: str, seconds: float, **changes: object) -> Record:
    return record(method=method, seconds=seconds, **changes)  # type: ignore[arg-type]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for trial in (of_speed("burst", 0.1), of_speed("megatron_cp", 0.3), of_speed("ulysses", 0.2)):
        write_record(tmp_path / "a" / "run" / "trials" / trial.trial_id, trial)
    return tmp_path / "a" / "run"


def test_a_report_compares_with_the_baseline_that_is_asked_for(run_dir: Path) -> None:
    assert main(["report", str(run_dir), "--baseline", "megatron_cp", "--format", "md"]) == 0
    text = (run_dir / "tables" / "comparison.md").read_text()
    assert "burst ÷ megatron_cp" in text
    assert "ulysses ÷ megatron_cp" in text


def test_a_site_compares_with_the_baseline_in_the_runs_that_have_it(run_dir: Path) -> None:
    other = of_speed("burst", 0.1)
    write_record(run_dir.parent / "other" / "trials" / other.trial_id, other)
    assert main(["report", str(run_dir.parent), "--baseline", "megatron_cp", "--format", "md"]) == 0
    assert "burst ÷ megatron_cp" in (run_dir / "tables" / "comparison.md").read_text()


@pytest.mark.parametrize("level", [0, 1])
def test_an_unknown_baseline_is_refused_with_the_nearest_method(run_dir: Path, capsys, level: int) -> None:
    directory = run_dir.parent if level else run_dir
    assert main(["report", str(directory), "--baseline", "ulises"]) == 2
    said = capsys.readouterr().err
    assert "--baseline ulises: no trial of these records is of that method; did you mean ulysses?" in said
    assert not (run_dir / "report.html").exists()
