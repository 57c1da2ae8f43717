"""The records to compare: of a directory's runs, or everything that was ever kept below it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.base.errors import UsageError, one_of
from harness.records.provenance import DIRTY
from harness.records.record import BadRecord, Record, RecordPlace, refuse_bad
from harness.records.stored import StoredRecord, StoredRun, read_all, resolved, runs_below, stored_run
from harness.report.results import Row, row_of, setting_names

_MOVED_ASIDE = re.compile(r"\.\d{8}-\d{6}(-\d+)?")  # what `burst run` adds to the name of an earlier run
_SHORT = 12  # characters of a commit in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRecord:
    """A record, the path of its run, where it is stored, and its row."""

    run: Path
    place: RecordPlace
    record: Record
    row: Row

    @property
    def settings(self) -> Row:
        """The settings of the trial by name, those of its steps left out."""
        return {name: self.row[name] for name in setting_names(self.row) if not name.startswith("steps.")}

    @property
    def groups(self) -> set[str]:
        """The names of settings that have members, such as `checkpoint`."""
        return {name.partition(".")[0] for name in self.settings if "." in name}


def of_directory(directory: Path) -> list[ComparedRecord]:
    """The records of a run, or of every run below a directory. Raises UsageError where there is none."""
    found = _read((run, one) for run in _runs(directory) for one in run.records())
    if not found:
        raise UsageError(f"no record below {directory}; name a run, or a directory that holds runs")
    return found


def ever_kept(directories: Sequence[Path]) -> list[ComparedRecord]:
    """Records of all runs at or below `directories`, of their earlier attempts, and of runs moved aside from there."""
    runs: dict[Path, None] = {}
    for directory in directories:
        beside = sorted(
            path
            for path in directory.resolve().parent.glob(f"{_escaped(directory.resolve().name)}.*")
            if _MOVED_ASIDE.fullmatch(path.name.removeprefix(directory.resolve().name))
        )
        runs.update((resolved(run.path), None) for place in (directory, *beside) for run in _runs(place))
    found = _read((run, one) for run in map(stored_run, runs) for one in (*run.records(), *run.attempts()))
    if not found:
        places = ", ".join(map(str, directories))
        raise UsageError(f"no record below {places}; name runs, or directories that hold runs")
    return found


def of_commit(members: Sequence[ComparedRecord], prefix: str) -> list[ComparedRecord]:
    """The records of one commit, named by the start of its hash; with `-dirty` at the end, those of a changed tree.

    Raises UsageError where no commit or several begin so.
    """
    wanted, dirty = prefix.removesuffix(DIRTY), prefix.endswith(DIRTY)
    found = {
        member.record.commit
        for member in members
        if member.record.commit.startswith(wanted) and member.record.commit.endswith(DIRTY) == dirty
    }
    if len(found) != 1:
        known = sorted({_shortened(member.record.commit) for member in members if member.record.commit})
        what = "several of these begin so" if found else f"these records are of {one_of(known) if known else 'none'}"
        listed = one_of(sorted(map(_shortened, found))) if found else ""
        raise UsageError(f"--commits {prefix}: {what}{f': {listed}' if listed else ''}; give more of one commit's hash")
    [commit] = found
    return [member for member in members if member.record.commit == commit]


def latest(members: Iterable[ComparedRecord]) -> ComparedRecord:
    """Of several records of one trial the one that started last."""
    return max(members, key=lambda member: (member.record.started_at, member.record.attempts, str(member.place)))


def _runs(directory: Path) -> list[StoredRun]:
    return [stored_run(path) for path in runs_below(directory) or [directory]]


def _read(stored: Iterable[tuple[StoredRun, StoredRecord | BadRecord]]) -> list[ComparedRecord]:
    """Raises UsageError that lists every record that cannot be used."""
    members: list[ComparedRecord] = []
    bad: list[BadRecord] = []
    for run, one in stored:

        def use(found: StoredRecord, record: Record, run: StoredRun = run) -> None:
            members.append(ComparedRecord(run=run.path, place=found.place, record=record, row=row_of(record)))

        bad += read_all([one], use)
    refuse_bad(bad)
    return members


def _shortened(commit: str) -> str:
    return commit.removesuffix(DIRTY)[:_SHORT] + (DIRTY if commit.endswith(DIRTY) else "")


def _escaped(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)
