"""Whether attention's cost follows the mask's area, from records."""

from __future__ import annotations

import pytest

from harness.records.record import Record, write_record
from harness.report.page import write_report
from harness.report.results import rows_of
from harness.report.tables.particular import mask_table
from tests.harness.synthetic_records import SMALL, record

WINDOW = "sliding_window:63"


def attention(seconds: float, mask: str, seq_len: int, **changes: object) -> Record:
    """A trial whose one measured step takes `seconds`."""
    trial = record(task="attention", mask=mask, seq_len=seq_len, **changes)
    assert trial.measurement is not None
    trial.measurement.step_seconds = [seconds]
    return trial


def test_a_cost_that_follows_the_area_is_one_number_of_nanoseconds_per_pair() -> None:
    area = {seq_len: 64 * seq_len - 64 * 63 // 2 for seq_len in (1024, 2048)}
    trials = [attention(1e-8 * pairs * SMALL.heads, WINDOW, seq_len) for seq_len, pairs in reversed(area.items())]
    table = mask_table(rows_of([*trials, attention(1.0, "full", 1024)]))
    assert table is not None
    headers = [column.header for column in table.columns]
    found = [dict(zip(headers, row, strict=True)) for row in table.rows]
    assert [(line["mask"], line["tokens"]) for line in found] == [("full", 1024), (WINDOW, 1024), (WINDOW, 2048)]
    assert [line["pairs"] for line in found] == [1024 * 1024, *area.values()]
    assert found[0]["% of full"] == 1.0
    assert [line["ns per pair"] for line in found[1:]] == [pytest.approx(1e-8), pytest.approx(1e-8)]
    assert found[1]["host GiB"] == pytest.approx(0.5)


def test_ranks_and_sequences_count_in_the_cost_of_a_pair() -> None:
    alone, shared = (attention(0.1, "full", 1024, cp_size=ranks, batch_size=2) for ranks in (1, 2))
    table = mask_table(rows_of([alone, shared, attention(0.1, "causal", 1024)]))
    assert table is not None
    costs = {(row[2], row[3]): row[9] for row in table.rows}
    assert costs["full", "CP 2"] == pytest.approx(2 * costs["full", "CP 1"])
    assert costs["full", "CP 1"] == pytest.approx(0.1 / (2 * 1024 * 1024 * SMALL.heads))


def test_one_mask_has_nothing_to_be_compared_with() -> None:
    training = record(mask="full")
    failed = record(task="attention", mask="full", status="failed")
    assert mask_table(rows_of([attention(0.1, WINDOW, 1024), training, failed])) is None


def test_a_report_of_several_masks_holds_the_table(tmp_path) -> None:
    run = tmp_path / "run"
    for trial in (attention(0.1, WINDOW, 1024), attention(0.3, "full", 1024)):
        write_record(run / "trials" / trial.trial_id, trial)
    write_report([run], tmp_path / "out", ["html", "md"])
    assert "ns per pair" in (tmp_path / "out" / "tables" / "masks.md").read_text()
    assert "Cost of attention against the mask" in (tmp_path / "out" / "report.html").read_text()
