"""The audit: published TFLOP/s and MFU beside those that one formula gives."""

from __future__ import annotations

import dataclasses
import statistics
from itertools import groupby, pairwise
from pathlib import Path

import pytest

from harness.records.record import RecordPlace
from harness.report.results import row_of
from harness.report.tables.table import to_csv
from harness.reproduce.audit import (
    audit_table,
    printed_by_systems,
    printed_table,
    published_systems,
    recomputed_rows,
    recomputed_systems,
    systems_table,
)
from harness.reproduce.points import all_rows, runs_in
from tests.harness.synthetic_records import H200, LARGE, record

PUBLISHED = Path(__file__).parents[3] / "results" / "published"


@pytest.fixture(scope="module")
def found():
    return recomputed_rows()


def ratios(found, source: str, metric: str) -> list[float]:
    return [one.ratio for one in found if (one.source, one.metric) == (source, metric)]


@pytest.mark.parametrize(
    ("source", "metric", "count"),
    [("cp_scaling", "tflops_per_gpu", 7), ("cp_scaling", "mfu", 7), ("single_node", "tflops_per_gpu", 12),
     ("multi_node_7b_early", "tflops_per_gpu", 19), ("e2e_main", "mfu_as_plotted", 19)],
)  # fmt: skip
def test_figures_of_the_sheets_are_1024_over_1000_of_the_recomputed(found, source, metric, count) -> None:
    here = ratios(found, source, metric)
    assert len(here) == count
    assert all(abs(ratio - 1.024) < 3e-4 for ratio in here)


def test_megatrons_fork_and_the_tables_of_the_library_count_as_we_do(found) -> None:
    for ratio in ratios(found, "megatron_fork_unlabelled", "tflops_per_gpu"):
        assert abs(ratio - 1) < 3e-4
    library = ratios(found, "burstattention_seq_scaling", "tflops_per_gpu")
    assert len(library) == 9
    assert all(abs(ratio - 1) < 5e-3 for ratio in library)


def test_times_that_contradict_their_rate_are_marked(found) -> None:
    table = audit_table(found)
    marked = {(table.rows[place][1], table.rows[place][3]) for place in table.marked}
    assert ("Megatron CP RingAttn", "256k") in marked
    lines = to_csv(table).splitlines()
    assert lines[0] == "source,method,model,tokens,GPUs,metric,published,recomputed,published ÷ recomputed,from,note"
    assert len(lines) == len(found) + 1 > 150


def test_every_ratio_is_published_over_recomputed(found) -> None:
    assert all(one.ratio == one.published / one.recomputed for one in found)
    assert 1 < statistics.median(one.ratio for one in found) < 1.025


def test_systems_without_speed_or_time_are_listed_and_not_recomputed() -> None:
    rows = recomputed_systems()
    assert len(rows) == len(published_systems()) == len(systems_table().rows)
    for system, rate, utilisation in rows:
        given = system.tokens_per_gpu_per_second or system.step_seconds
        assert (rate is None) == (utilisation is None) == (given is None)
        assert utilisation is None or 0.05 < utilisation < 1
        assert system.where.startswith("https://")


def test_what_systems_printed_stands_beside_our_count_of_the_same_trial() -> None:
    """torchtitan counts attention without the causal mask, and so more the longer the sequence; Megatron-LM counts it
    as we do."""
    printed = printed_by_systems(all_rows(runs_in([PUBLISHED / "h200x1"])))
    torchtitan = [one for one in printed if one.row["method"] == "torchtitan_upstream"]
    assert [one.row["seq_len"] for one in torchtitan] == sorted(one.row["seq_len"] for one in torchtitan)
    by_length = [[one.ratio for one in same] for _, same in groupby(torchtitan, lambda one: one.row["seq_len"])]
    assert all(max(shorter) <= min(longer) for shorter, longer in pairwise(by_length))
    # Of one trial, as printed in several runs; steps of 16K differ from each other by more.
    assert all(max(same) < 1.015 * min(same) for same in by_length)
    assert torchtitan[0].ratio > 1.3
    megatron = [one for one in printed if one.row["method"] == "megatron_lm_upstream"]
    assert len(megatron) >= 6
    assert all(abs(one.ratio - 1) < 0.03 for one in megatron)
    table = printed_table(printed)
    assert {printed[place].row["method"] for place in table.marked} == {"torchtitan_upstream"}
    for one in printed:
        assert one.ratio == (one.tflops or 0) / one.row["tflops_per_gpu"]


def test_a_share_alone_is_compared_with_ours_and_a_trial_that_printed_neither_is_left_out() -> None:
    made = record(gpu=H200, model=LARGE, dtype="bf16", method="torchtitan_upstream", seconds=2.0, seq_len=1024)
    assert made.measurement is not None
    rows = []
    for name, own in (("share", {"mfu": 50.0, "tps": 10.0}), ("neither", {"tps": 10.0})):
        measured = dataclasses.replace(made.measurement, extra={"upstream": {"printed": own}})
        rows.append((row_of(dataclasses.replace(made, measurement=measured)), RecordPlace(Path(name))))
    [one] = printed_by_systems(rows)
    assert (one.tflops, one.mfu) == (None, 0.5)
    assert one.ratio == 0.5 / one.row["mfu"]
    assert "neither" not in to_csv(printed_table([one]))
