"""All records of one run and their rows: read once, then kept as trials finish."""

from __future__ import annotations

import time
from pathlib import Path

from harness.records.record import BadRecord, Record, read_record, record_files, refuse_bad, set_aside
from harness.records.stated import stated_in
from harness.report.results import Row, in_order, row_of, write_results

WRITE_SECONDS = 30.0  # between two writes of results.csv while trials run; the last one is at the end


class RunRecords:
    """The records in a run's directory, by the name of their trial's directory; `run` names the run in rows."""

    def __init__(self, run_dir: Path, run: str = "") -> None:
        self.run_dir = run_dir
        self._run = run or run_dir.resolve().name
        self._stated = stated_in(run_dir)
        self._records: dict[str, Record] = {}
        self._rows: dict[str, Row] = {}
        self._in_order: list[Row] | None = None  # the rows, sorted since the last one came
        self._written_at = time.monotonic()

    def read(self) -> list[BadRecord]:
        """Read every record there is, and return those that cannot be used: no record, or one that makes no sense."""
        bad = []
        for path in record_files(self.run_dir):
            try:
                self._put(path.parent.name, read_record(path))
            except ValueError as error:
                bad.append(BadRecord(path, str(error)))
            except ArithmeticError as error:
                bad.append(BadRecord(path, f"{path} makes no sense ({error})"))
        return bad

    def read_usable(self, *, set_bad_aside: bool = False) -> list[tuple[Path, Path]]:
        """Read every record; returns from where to where bad ones were renamed, so that they are passed over.

        Raises UsageError that lists all of them where that was not asked for.
        """
        bad = self.read()
        if not set_bad_aside:
            refuse_bad(bad)
        return [(one.path, set_aside(one)) for one in bad]

    def get(self, trial_id: str) -> Record | None:
        return self._records.get(trial_id)

    def put(self, record: Record) -> None:
        """The record that a trial has left now."""
        self._put(record.trial_id, record)

    def _put(self, trial_id: str, record: Record) -> None:
        try:
            row = row_of(record, self._run, self._stated)
        except ValueError as error:
            place = self.run_dir / "trials" / trial_id
            raise ValueError(f"{place / 'record.json'} makes no sense ({error})") from error
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
