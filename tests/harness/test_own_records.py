"""The prediction beside this engine's own training records: today's are judged, older ones listed."""

from __future__ import annotations

import csv

from harness.plan.own_records import (
    BLOCK,
    PUBLISHED,
    TABLE_FILE,
    TODAY,
    WITHIN,
    compared_records,
    median_error,
    summary,
    table_rows,
)
from harness.predict.validation_table import PAGE, marks
from harness.records.record import read_record


def test_records_of_todays_engine_are_predicted_within_the_aims() -> None:
    judged = [row for row in compared_records() if row.judged]
    assert len(judged) >= 20
    assert {row.kernel for row in judged} >= {"fa4", "cudnn"}
    for figure, aim in WITHIN.items():
        assert median_error(judged, figure) < aim, figure
        assert max(abs(row.error(figure)) for row in judged) < 1.5 * aim, figure


def test_every_training_record_of_the_engine_on_gpus_is_listed() -> None:
    listed = {row.record for row in compared_records()}
    for path in PUBLISHED.glob("h*/*/trials/*/record.json"):
        record = read_record(path)
        if (
            record.settings.task == "train"
            and record.status == "ok"
            and not record.settings.method.endswith("upstream")
        ):
            assert str(path.parent.relative_to(PUBLISHED)) in listed
    assert {row.record.split("/")[0] for row in compared_records() if row.judged} == set(TODAY)


def test_the_committed_table_is_what_the_prediction_gives_today() -> None:
    with TABLE_FILE.open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == table_rows()
    begin, end = marks(BLOCK)
    assert PAGE.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].strip() == summary()
