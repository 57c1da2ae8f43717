"""All records of one run and their rows: read once, then kept as trials finish."""

from __future__ import annotations

import time
from pathlib import Path

from harness.records.record import BadRecord, Record, RecordPlace, refuse_bad, set_aside
from harness.records.stored import StoredRecord, read_all, stored_run
from harness.report.results import Row, in_order, row_of, write_results

WRITE_SECONDS = 30.0  # between two writes of results.csv while trials run; the last one is at the end


class RunRecords:
    """The records of a run by their trials; `run` names the run in rows."""

    def __init__(self, path: Path, run: str = "") -> None:
        self.stored = stored_run(path)
        self._run = run or self.stored.name
        self._stated = self.stored.stated()
        self._records: dict[str, Record] = {}
        self._rows: dict[str, Row] = {}
        self._places: dict[str, RecordPlace] = {}  # of those that were read
        self._in_order: list[Row] | None = None  # the rows, sorted since the last one came
        self._written_at = time.monotonic()

    def read(self) -> list[BadRecord]:
        """Read every record there is, and return those that cannot be used: no record, or one that makes no sense."""

        def use(one: StoredRecord, record: Record) -> None:
            self._put(one.trial, record)
            self._places[one.trial] = one.place

        return read_all(self.stored.records(), use)

    def read_usable(self, *, set_bad_aside: bool = False) -> list[tuple[Path, Path]]:
        """Read every record; returns from where to where bad ones were renamed, so that they are passed over.

        Raises UsageError that lists all of them where that was not asked for.
        """
        bad = self.read()
        if not set_bad_aside:
            refuse_bad(bad)
        return set_aside(bad)

    def get(self, trial_id: str) -> Record | None:
        return self._records.get(trial_id)

    def place(self, trial_id: str) -> RecordPlace:
        """Where a record is that was read."""
        return self._places[trial_id]

    def put(self, record: Record) -> None:
        """The record that a trial has left now."""
        self._put(record.trial_id, record)

    def _put(self, trial_id: str, record: Record) -> None:
        row = row_of(record, self._run, self._stated)
        self._records[trial_id], self._rows[trial_id], self._in_order = record, row, None

    def records(self) -> list[Record]:
        """In order of trial id."""
        return [self._records[trial_id] for trial_id in sorted(self._records)]

    def rows(self) -> list[Row]:
        """In the order of tables and figures."""
        if self._in_order is None:
            self._in_order = in_order(self._rows.values())
        return list(self._in_order)

    def write(self, path: Path, *, at_once: bool = True) -> None:
        """Write results.csv; unless `at_once`, only where the last time was WRITE_SECONDS ago."""
        if at_once or time.monotonic() - self._written_at >= WRITE_SECONDS:
            write_results(path, self.rows())
            self._written_at = time.monotonic()
