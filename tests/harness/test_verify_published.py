"""The published records pass `burst verify`: figures can be computed again, and tables state the gaps."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from harness.report.site import runs_below
from harness.verify.finding import Verdict
from harness.verify.history import History
from harness.verify.verdict import verify

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "published"


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    return verify(PUBLISHED, History())


def test_every_published_run_holds(verdicts: list[Verdict]) -> None:
    assert len(verdicts) == len(runs_below(PUBLISHED)) > 10
    assert [f"{one.run}: {failure}" for one in verdicts for failure in one.failures] == []


def test_every_published_row_has_its_command_and_what_it_cannot_show_beside_its_numbers(
    verdicts: list[Verdict],
) -> None:
    for verdict in verdicts:
        with open(PUBLISHED / verdict.run / "results.csv", encoding="utf-8", newline="") as file:
            rows = {row["trial_id"]: row for row in csv.DictReader(file)}
        commands = ("burst run experiments/", "burst reproduce ")
        assert all(row["run_command"].startswith(commands) for row in rows.values()), verdict.run
        for gap in verdict.stated:
            assert gap.says in rows[gap.place]["caveats"], (verdict.run, gap)
