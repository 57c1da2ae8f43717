"""What a trial ran is said in words wherever the trial is shown."""

from __future__ import annotations

import csv
import random
from dataclasses import replace
from pathlib import Path

import pytest

from engine.settings import Checkpoint, Steps
from harness.cli import main
from harness.records.record import Record, write_record
from harness.report.drawing.looks import looks_of
from harness.report.headline import headline_of
from harness.report.page import TABLES, report_tables
from harness.report.results import row_of, rows_of, write_results
from harness.report.tables.comparison import comparison_table
from harness.report.tables.particular import mask_table
from harness.report.tables.table import to_markdown
from harness.report.tables.trials import series_names, terminal_table
from harness.report.variants import footnotes_of, series_of
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
    trial = replace(trial, system="Megatron-LM")
    assert [name for name, _ in series_of(rows_of([trial]))] == ["Megatron-LM"]
    assert footnotes_of(rows_of([trial])) == [
        "Megatron-LM: megatron-core 0.19.2, ninja 1.0 mine, TransformerEngine 2.12.0 compiled -O1.",
        "Attention kernel: torch on the CPU.",
    ]


def test_an_attention_function_is_named_with_what_it_sent_and_its_kernel() -> None:
    trial = ran({"arrangement": "ulysses 2 x ring 2", "kernel": "fa4", "schedule": "usp"}, method="yunchang_upstream")
    assert trial.measurement is not None
    trial.measurement.extra["upstream"] = {"release": "yunchang 0.6.4"}
    assert row_of(trial)["ran"] == "yunchang 0.6.4, ulysses 2 x ring 2 over fa4"


def test_one_rank_shares_nothing_and_a_trial_without_a_measurement_ran_nothing(tmp_path: Path) -> None:
    rows = rows_of([ran(RING, cp_size=1), ran(RING, status="oom")])
    with open(write_results(tmp_path / "results.csv", rows), newline="") as file:
        assert [(row["status"], row["ran"]) for row in csv.DictReader(file)] == [("ok", "one rank"), ("oom", "")]


def upstream(method: str, system: str, arrangement: str = "", **changes: object) -> Record:
    chosen = {"arrangement": arrangement, "kernel": "fa4"} if arrangement else {}
    trial = replace(ran(chosen, method=method, **changes), system=system)
    if trial.measurement is not None:
        trial.measurement.extra["upstream"] = {"release": f"{system} 1.0"}
    return trial


@pytest.mark.parametrize(
    ("trial", "name"),
    [
        (ran(RING, schedule="ring"), "burst (ring)"),
        (ran(DOUBLE, schedule="double_ring"), "burst (double ring)"),
        (ran(COPIED), "burst (Ulysses)"),
        (ran(COPIED, schedule="ulysses"), "burst (Ulysses)"),
        (ran(USP), "burst (USP)"),
        (ran(SENT, method="ulysses"), "ulysses"),
        (ran(RING_KEYS, method="ring"), "ring"),
        (ran(RING_KEYS, method="megatron_cp"), "megatron_cp"),
        (ran(DOUBLE, method="loongtrain_double_ring"), "loongtrain_double_ring"),
        (ran(RING, cp_size=1), "burst"),
        (ran(RING, status="oom"), "burst"),
        (upstream("torchtitan_upstream", "torchtitan"), "torchtitan"),
        (upstream("trl_upstream", "TRL + Liger-Kernel"), "TRL + Liger"),
        (upstream("transformer_engine_upstream", "TransformerEngine", "all_gather"), "TransformerEngine, all-gather"),
        (upstream("transformer_engine_upstream", "TransformerEngine", "p2p"), "TransformerEngine, ring"),
        (
            upstream("transformer_engine_upstream", "TransformerEngine", "a2a 4 + p2p 2"),
            "TransformerEngine, Ulysses 4 + ring 2",
        ),
        (upstream("ring_flash_attn_upstream", "ring-flash-attention", "zigzag ring"), "ring-flash-attention, zigzag"),
        (upstream("yunchang_upstream", "yunchang", "ulysses 4 x ring 1"), "yunchang, Ulysses"),
        (upstream("yunchang_upstream", "yunchang", "ulysses 2 x ring 2"), "yunchang, Ulysses 2 × ring 2"),
        (upstream("yunchang_upstream", "yunchang", "ulysses 2 x ring 2", status="oom"), "yunchang"),
    ],
)  # fmt: skip
def test_a_series_has_the_short_name_that_people_use(trial, name) -> None:
    assert series_names(rows_of([trial])) == [name]


@pytest.mark.parametrize("chosen", [COPIED, SENT])
def test_a_trial_that_exchanged_heads_is_never_called_a_ring(chosen) -> None:
    for schedule in ("auto", "ulysses"):
        rows = rows_of([ran(chosen, schedule=schedule), ran(RING, schedule="ring"), ran(RING, kernel="cudnn")])
        names = dict(zip((row["chosen_schedule"] for row in rows), series_names(rows), strict=True))
        assert "Ulysses" in names["ulysses"]
        assert "ring" not in names["ulysses"]


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
    rows = rows_of(trials)
    names = series_names(rows)
    assert len(set(names)) == len(trials), names
    assert "burst (ring), schedule double_ring" in names
    assert "burst (ring), kernel cudnn, schedule auto" in names
    assert "burst (ring), where a name does not say otherwise: backward auto, kernel auto." in footnotes_of(rows)


def test_a_setting_is_named_only_where_it_tells_series_of_one_name_apart() -> None:
    trials = [ran(RING, memory="24GiB"), ran(RING, memory=""), ran(SENT, method="ulysses", kernel="cudnn")]
    names = [name for name, _ in series_of(rows_of(trials))]
    assert sorted(names) == ["burst (ring), 24 GiB", "burst (ring), whole GPU", "ulysses"]


def test_a_set_up_by_another_name_than_that_of_most_methods_is_said() -> None:
    trials = [ran(RING, settings="as_published"), ran(RING_KEYS, method="megatron_cp", settings="as_published")]
    rows = rows_of([*trials, ran(SENT, method="ulysses")])
    assert [name for name, _ in series_of(rows)] == ["burst (ring)", "megatron_cp", "ulysses, equal settings"]
    assert "All, where a name does not say otherwise: as published." in footnotes_of(rows)


def test_what_was_exchanged_and_sent_is_a_footnote_with_the_lengths_where_it_changed() -> None:
    rows = rows_of([ran(RING, seq_len=1024), ran(RING_KEYS, seq_len=2048), ran(RING_KEYS, seq_len=4096), ran(COPIED)])
    assert footnotes_of(rows)[:2] == [
        "burst (ring): backward sends the query side (1k tokens); backward sends the key side (2k to 4k tokens).",
        "burst (Ulysses): heads exchanged by copy engine.",
    ]


def test_steps_warm_up_and_seeds_are_no_part_of_a_name() -> None:
    trials = [ran(COPIED, seed=seed, steps=Steps(warmup=seed, measured=3 + seed)) for seed in range(2)]
    assert series_names(rows_of(trials)) == ["burst (Ulysses)"] * 2


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
    assert len(choices) == len(series_of(rows))
    assert sum(len(members) for _, members in series_of(rows)) == len(trials)


@pytest.mark.parametrize("seed", range(40))
def test_two_series_never_have_equal_names(seed: int) -> None:
    draw = random.Random(seed)
    methods = ["burst", "ring", "loongtrain_usp", "trl_upstream", "yunchang_upstream", "loongtrain_upstream"]
    trials = []
    for _ in range(60):
        published = draw.random() < 0.4
        tail = draw.choice([0.0, 0.5])
        one = ran(
            draw.choice([RING, RING_KEYS, COPIED, USP, {"arrangement": "a2a", "kernel": "fa4"}]),
            method=draw.choice(methods),
            settings=draw.choice(["as_published", "tuned"]) if published else "equal",
            checkpoint=Checkpoint(tail=tail, plan=draw.choice(["hand", "auto"])),
            planned=draw.choice(["", "checkpoint.tail mlp_tiles"]),
            mlp_tiles=draw.choice([1, 8]),
            memory=draw.choice(["", "24GiB", "24.5GiB"]),
            optimizer_offload=draw.random() < 0.5,
            cp_size=draw.choice([1, 4]),
            status=draw.choice(["ok", "ok", "oom"]),
        )
        by_hand = ["checkpoint.tail"] if published and draw.random() < 0.5 else []
        trials.append(replace(one, system="LoongTrain", settings_by_hand=by_hand))
    series = series_of(rows_of(trials))
    assert len({name for name, _ in series}) == len(series)


def test_a_figure_shows_a_trial_without_a_number_among_those_of_its_settings() -> None:
    trials = [
        ran(COPIED, seq_len=1024),
        ran(COPIED, seq_len=2048, status="oom"),
        ran(RING, seq_len=1024, cp_size=1),
        ran(SENT, method="ulysses"),
    ]
    series = series_of(rows_of(trials))
    assert [(name, len(rows)) for name, rows in series] == [
        ("burst (Ulysses)", 3), ("ulysses", 1),
    ]  # fmt: skip
    assert {look.variant for look in looks_of(series).values()} == {0}


def test_what_auto_took_at_different_lengths_is_two_series_that_look_different() -> None:
    trials = [ran(COPIED, seq_len=2048), ran(RING, seq_len=1024), ran({}, seq_len=4096, status="oom")]
    series = series_of(rows_of(trials))
    assert [name for name, _ in series] == ["burst", "burst (Ulysses)", "burst (ring)"]
    looks = looks_of(series)
    assert looks["burst (ring)"] != looks["burst (Ulysses)"]


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
        assert "burst (Ulysses)" in tables[name], name
    assert mask_table(rows) is not None
    assert "burst (Ulysses)" in tables["comparison"]
    assert "times as fast as ulysses" in headline_of(rows).verdict
    assert headline_of(rows).verdict.startswith("burst (Ulysses)")
    cells = list(terminal_table(rows).columns[0].cells)
    assert {str(cell) for cell in cells} == {"burst", "burst (Ulysses)", "ulysses"}
    assert set(tables) <= TABLES.keys()


def test_a_comparison_names_at_each_point_what_a_method_ran() -> None:
    trials = []
    for seq_len, chosen in ((1024, RING), (2048, COPIED)):
        trials += [ran(chosen, seq_len=seq_len), ran(SENT, method="ulysses", seq_len=seq_len)]
    table = comparison_table(rows_of(trials))
    assert table is not None
    at = [column.header for column in table.columns].index("method")
    assert [row[at] for row in table.rows] == ["burst (ring)", "burst (Ulysses)"]


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
    assert "| burst | megatron_cp | 3.00× |" in text
    assert "| ulysses | megatron_cp | 1.50× |" in text


def test_a_site_compares_with_the_baseline_in_the_runs_that_have_it(run_dir: Path) -> None:
    other = of_speed("burst", 0.1)
    write_record(run_dir.parent / "other" / "trials" / other.trial_id, other)
    assert main(["report", str(run_dir.parent), "--baseline", "megatron_cp", "--format", "md"]) == 0
    assert "| burst | megatron_cp | 3.00× |" in (run_dir / "tables" / "comparison.md").read_text()


@pytest.mark.parametrize("level", [0, 1])
def test_an_unknown_baseline_is_refused_with_the_nearest_method(run_dir: Path, capsys, level: int) -> None:
    directory = run_dir.parent if level else run_dir
    assert main(["report", str(directory), "--baseline", "ulises"]) == 2
    said = capsys.readouterr().err
    assert "--baseline ulises: no trial of these records is of that method; did you mean ulysses?" in said
    assert not (run_dir / "report.html").exists()
