"""A run on disk as every reader sees it: the directory that `burst run` left, or one packed file (`packed.py`).

A run has a name: that of its directory, or its file's name without `.jsonl`. What `burst report` makes of a run goes
into its directory, or into a directory of that name beside the file.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from cluster.files.filesystem import read_text
from cluster.files.reader import read_yaml
from engine.reader import MAX_BYTES, parse_json, read_regular
from harness.base.errors import UsageError
from harness.records.packed import (
    SUFFIX,
    VERSION,
    RunHeader,
    is_packed,
    node_of,
    read_header,
    read_lines,
    trial_id_in,
)
from harness.records.record import (
    RECORD_FILE,
    BadRecord,
    Record,
    RecordPlace,
    no_record,
    record_of,
    refuse_bad,
)
from harness.records.stated import NOTHING_STATED, PROVENANCE_FILE, StatedProvenance, stated_in, stated_of

RUN_FILE, EXPERIMENT_FILE = "run.json", "experiment.yaml"  # what `burst run` leaves beside the records
RESULTS_FILE, REPORT_FILE = "results.csv", "report.html"  # what a report makes of them


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One record as it stands on disk, before it is understood."""

    trial: str  # the name of its directory, or the trial id of its line
    place: RecordPlace
    content: bytes
    data: object  # the JSON value

    def record(self) -> Record:
        """Raises ValueError that names the place when this is not a record this version understands."""
        return record_of(self.data, self.place)


class StoredRun(ABC):
    """One run on disk. Nothing is read before it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    @abstractmethod
    def report_dir(self) -> Path:
        """Where the run's report goes unless the user says otherwise; the name of this directory is the run's."""

    @property
    def name(self) -> str:
        return self.report_dir.resolve().name

    @abstractmethod
    def records(self) -> Iterator[StoredRecord | BadRecord]:
        """Every record in order of trial id, and in the place of each that is no JSON of its trial, why."""

    def attempts(self) -> Iterator[StoredRecord | BadRecord]:
        """Records of earlier attempts of the trials, where the run keeps them."""
        return iter(())

    @abstractmethod
    def stated(self) -> StatedProvenance:
        """What the run's provenance states. Raises UsageError where it is bad."""

    @abstractmethod
    def header(self) -> RunHeader:
        """What a packed file says of the run in its first line. Raises UsageError for files that are not readable."""

    @abstractmethod
    def planned(self) -> list[str] | None:
        """Ids of the trials that the run planned, None where it does not tell. Raises ValueError for a bad plan."""

    @abstractmethod
    def texts(self) -> Iterator[tuple[str, str | None]]:
        """What was written about the run besides its records: the name and the text of each, None if not readable."""

    @abstractmethod
    def record_file(self, trial: str) -> Path:
        """The file that holds the record of a trial."""


class DirectoryRun(StoredRun):
    """The directory that `burst run` left, while it runs and afterwards."""

    @property
    def report_dir(self) -> Path:
        return self.path

    def records(self) -> Iterator[StoredRecord | BadRecord]:
        return map(_stored, sorted(self.path.glob(f"trials/*/{RECORD_FILE}")))

    def attempts(self) -> Iterator[StoredRecord | BadRecord]:
        return map(_stored, sorted(self.path.glob(f"trials/*/attempts/*/{RECORD_FILE}")))

    def stated(self) -> StatedProvenance:
        return stated_in(self.path)

    def header(self) -> RunHeader:
        self.stated()  # read strictly, so that the values below are what it means
        stated = self.path / PROVENANCE_FILE
        plan, experiment = (
            read_text(self.path / name, name, MAX_BYTES) if os.path.lexists(self.path / name) else ""
            for name in (RUN_FILE, EXPERIMENT_FILE)
        )
        try:
            planned = cast(dict[str, Any], parse_json(plan)) if plan else None
        except ValueError as error:
            raise UsageError(f"{self.path / RUN_FILE} is not readable as JSON ({error}); remove it") from error
        return RunHeader(
            burst_run=VERSION,
            records=sum(1 for _ in self.records()),
            provenance=read_yaml(stated, PROVENANCE_FILE).plain if os.path.lexists(stated) else {},
            plan=planned,
            experiment=experiment,
        )

    def planned(self) -> list[str] | None:
        if not os.path.lexists(self.path / RUN_FILE):
            return None
        try:
            return _trials(parse_json(read_regular(self.path / RUN_FILE)))
        except OSError as error:
            raise ValueError(f"{RUN_FILE} cannot be read ({error.strerror})") from error

    def texts(self) -> Iterator[tuple[str, str | None]]:
        for name in (RUN_FILE, EXPERIMENT_FILE, PROVENANCE_FILE):
            if os.path.lexists(self.path / name):
                try:
                    yield name, read_regular(self.path / name).decode(errors="replace")
                except (OSError, ValueError):
                    yield name, None

    def record_file(self, trial: str) -> Path:
        return self.path / "trials" / trial / RECORD_FILE


class PackedRun(StoredRun):
    """One packed file."""

    @property
    def report_dir(self) -> Path:
        return self.path.with_suffix("")

    def records(self) -> Iterator[StoredRecord | BadRecord]:
        before, found = "", 0
        said = self._header.records
        for number, line in enumerate(read_lines(self.path), start=1):
            if number == 1:
                continue
            found += 1
            place = RecordPlace(self.path, number)
            try:
                if len(line) > MAX_BYTES:
                    raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB, and nothing after it is read")
                if not line.endswith(b"\n"):
                    raise ValueError("it has no end of line, so the file has lost its end")
                data = parse_json(line)
                before = trial_id_in(data, before)
            except ValueError as error:
                yield BadRecord(place, no_record(place, error))
                continue
            yield StoredRecord(before, place, line, data)
        if found != said:
            place = RecordPlace(self.path, 1)
            yield BadRecord(place, f"{place}: the header says {said} records, and {found} lines follow")

    def stated(self) -> StatedProvenance:
        if not self._header.provenance:
            return NOTHING_STATED
        return stated_of(node_of(self._header.provenance, f"{self.path}:1"))

    def header(self) -> RunHeader:
        return self._header

    def planned(self) -> list[str] | None:
        return None if self._header.plan is None else _trials(self._header.plan)

    def texts(self) -> Iterator[tuple[str, str | None]]:
        yield "header", next(read_lines(self.path)).decode(errors="replace")

    def record_file(self, trial: str) -> Path:
        return self.path

    @cached_property
    def _header(self) -> RunHeader:
        return read_header(self.path)


def stored_run(path: Path) -> StoredRun:
    """The run at a path: packed where its name ends with `.jsonl` and it is no directory. It need not exist."""
    return PackedRun(path) if path.suffix == SUFFIX and not path.is_dir() else DirectoryRun(path)


def resolved(path: Path) -> Path:
    """The absolute path of a run, by which a run that is named twice is one. A packed file that is a link keeps its own
    name, which says what it is."""
    return path.parent.resolve() / path.name if isinstance(stored_run(path), PackedRun) else path.resolve()


def run_named(folder: Path, name: str) -> Path:
    """The path of a run below a folder by its name, such as `h200x1/one_gpu`."""
    file = folder / f"{name}{SUFFIX}"
    return file if os.path.lexists(file) else folder / name


def runs_below(directory: Path) -> list[Path]:
    """Runs below `directory`, in order of their names; empty when it is itself a run, or there are none.

    Raises UsageError where a directory and a packed file are runs of one name.
    """
    if is_run(directory):
        return []
    found = sorted(_walk(directory), key=lambda path: stored_run(path).report_dir)
    refuse_one_name(found)
    return found


def refuse_one_name(runs: Sequence[Path]) -> None:
    """Raise UsageError where two different runs have one name and place, so that their reports would be one."""
    by_name: dict[Path, Path] = {}
    for path in runs:
        other = by_name.setdefault(stored_run(path).report_dir, path)
        if other != path:
            raise UsageError(f"{other} and {path} are two runs of one name; rename one of them, or move it away")


def is_run(path: Path) -> bool:
    """Whether a directory holds records, or a file is a packed run."""
    return is_packed(path) or any(path.glob(f"trials/*/{RECORD_FILE}"))


def read_all(
    stored: Iterable[StoredRecord | BadRecord], use: Callable[[StoredRecord, Record], None]
) -> list[BadRecord]:
    """Read every record and hand it to `use`; returns those that cannot be used: no record, or one that makes no sense,
    as `use` says by a ValueError or ArithmeticError."""
    bad = []
    for one in stored:
        if isinstance(one, BadRecord):
            bad.append(one)
            continue
        try:
            record = one.record()
        except ValueError as error:
            bad.append(BadRecord(one.place, str(error)))
            continue
        except ArithmeticError as error:
            bad.append(BadRecord(one.place, f"{one.place} makes no sense ({error})"))
            continue
        try:
            use(one, record)
        except (ValueError, ArithmeticError) as error:
            bad.append(BadRecord(one.place, f"{one.place} makes no sense ({error})"))
    return bad


def read_records(path: Path) -> list[Record]:
    """All records of a run, in order of trial id. Raises UsageError that lists every bad one."""
    records: list[Record] = []
    refuse_bad(read_all(stored_run(path).records(), lambda _, record: records.append(record)))
    return records


def _stored(path: Path) -> StoredRecord | BadRecord:
    """The record in a file of its own."""
    place = RecordPlace(path)
    try:
        content = read_regular(path)
        return StoredRecord(path.parent.name, place, content, parse_json(content))
    except OSError as error:
        return BadRecord(place, f"{path} cannot be read ({error.strerror})")
    except ValueError as error:
        return BadRecord(place, no_record(place, error))


def _trials(plan: Any) -> list[str]:
    """The trials of a plan. Raises ValueError where it names none."""
    trials = plan.get("trials") if isinstance(plan, dict) else None
    if not isinstance(trials, list):
        raise ValueError("the plan has no list of trials")
    return [str(trial) for trial in trials]


def _walk(directory: Path) -> Iterator[Path]:
    """Runs below a directory; neither links nor hidden folders are followed, and a run holds no others."""
    for folder, names, files in os.walk(directory):
        if is_run(Path(folder)):
            yield Path(folder)
            names.clear()
            continue
        names[:] = [name for name in names if not name.startswith(".")]
        yield from (path for name in files if not name.startswith(".") and is_packed(path := Path(folder, name)))
