"""The records in results/published, for tests that hold of all of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from harness.records.stored import StoredRecord, runs_below, stored_run

PUBLISHED = Path(__file__).parents[1] / "results" / "published"


@cache
def stored_records() -> list[tuple[str, StoredRecord]]:
    """Every published record, with the name of its run, such as `h200x1/one_gpu`."""
    found = []
    for run in map(stored_run, runs_below(PUBLISHED)):
        for one in run.records():
            assert isinstance(one, StoredRecord), one.reason
            found.append((run.report_dir.relative_to(PUBLISHED).as_posix(), one))
    assert len(found) > 500
    return found
