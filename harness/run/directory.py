"""The directory of one `burst run`: its files, its lock, and earlier runs and attempts that are kept."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Required, TypedDict, Unpack, cast

from cluster.files.filesystem import try_lock
from engine.atomic import write_atomic
from engine.measurement import write_json
from engine.reader import read_json, read_regular
from harness.base.errors import UsageError
from harness.base.writable import make_writable
from harness.records.record import RECORD_FILE, Record, read_record
from harness.records.stored import EXPERIMENT_FILE, RESULTS_FILE, RUN_FILE, is_run
from harness.spec.written import same_meaning

LOCK_FILE = ".lock"
TRIAL_FILE = "trial.json"
ATTEMPTS_DIRECTORY = "attempts"
ROUNDS_DIRECTORY = "rounds"
RUN_FACTS = frozenset({"experiment", "trials", "started_at"})  # of run.json, those that readers rely on


class RunDescription(TypedDict, total=False):
    """Content of run.json: the plan. Runs before there were rounds lack what is not required."""

    experiment: Required[str]  # its name
    started_at: Required[str]
    trials: Required[list[str]]  # their ids, in the order of the plan
    title: str
    rounds: int
    launcher: str
    commit: str
    changes: list[str]  # digests of how the code differed from the commit, one of each start
    command: list[str]  # as typed, secrets redacted


class RunDirectory:
    """DIR of `burst run --out DIR`. Reading needs no lock; `opened_for_writing` takes one for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results = path / RESULTS_FILE

    def trial(self, trial_id: str) -> Path:
        return self.path / "trials" / trial_id

    def record(self, trial_id: str) -> Record | None:
        """The record of a finished trial, or None. Raises ValueError when it cannot be used."""
        path = self.trial(trial_id) / RECORD_FILE
        return read_record(path) if os.path.lexists(path) else None

    def describe(self, **facts: Unpack[RunDescription]) -> None:
        """Write run.json: the plan, for `burst status` and for readers of the directory."""
        write_json(self.path / RUN_FILE, facts)

    def description(self) -> RunDescription:
        """run.json. Raises UsageError when this is not the directory of a run."""
        try:
            value = read_json(self.path / RUN_FILE)
        except (OSError, ValueError) as error:
            found = error.strerror if isinstance(error, OSError) else "not readable as JSON"
            step = "name one that `burst run` left, such as results/runs/quickstart"
            if is_run(self.path):
                step = f"its records can be read: {shlex.join(['burst', 'report', str(self.path)])} shows them"
            if not self.path.exists():
                raise UsageError(f"{self.path} does not exist; {step}") from error
            raise UsageError(f"{self.path} is not the directory of a run ({RUN_FILE}: {found}); {step}") from error
        if not _describes_a_run(value):
            raise UsageError(f"{self.path / RUN_FILE} does not describe a run; run it again with --resume to mend it")
        return cast(RunDescription, value)

    def changed_trees(self) -> list[str]:
        """Digests of the changed code that left records here; empty where run.json does not tell."""
        try:
            found = self.description().get("changes")
        except UsageError:  # torn: a run that resumes mends it
            return []
        return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []

    def in_use(self) -> bool:
        """Whether a `burst run` is writing to it now."""
        path = self.path / LOCK_FILE
        if not path.is_file():
            return False
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                locked = try_lock(file, shared=True)
                return locked is False or (locked is None and not _holder_ended(file))
        except FileNotFoundError:
            return False

    def begin_attempt(self, trial_id: str) -> int:
        """Empty the trial directory, moving what is there to attempts/<n>; returns the coming attempt's number."""
        trial_dir = self.trial(trial_id)
        trial_dir.mkdir(parents=True, exist_ok=True)
        archive = trial_dir / ATTEMPTS_DIRECTORY
        left = [path for path in trial_dir.iterdir() if path != archive]
        number = next_attempt(archive)
        if left:
            (archive / str(number)).mkdir(parents=True)
            # The record last: after a stop half-way, the trial still counts as finished.
            for path in sorted(left, key=lambda path: path.name == RECORD_FILE):
                path.rename(archive / str(number) / path.name)
            number += 1
        return number

    def begin_round(self, trial_id: str, number: int, finished: Collection[int]) -> int:
        """Make room for the files of round `number` of a trial whose record stays; returns the coming attempt's number.

        Files of a `finished` round move to rounds/<n>/. Those of one that was broken off, or that is to run again, move
        to attempts/<n>/, with a copy of the record.
        """
        trial_dir = self.trial(trial_id)
        archive, rounds = trial_dir / ATTEMPTS_DIRECTORY, trial_dir / ROUNDS_DIRECTORY
        stays = {archive, rounds, trial_dir / RECORD_FILE}
        left = [path for path in trial_dir.iterdir() if path not in stays]
        last = round_of_files(trial_dir)
        if last in finished and last != number and not any((rounds / str(last) / path.name).exists() for path in left):
            _move(left, rounds / str(last))
            left = []
        for files in (left, _files_in(rounds / str(number))):
            if files:
                aside = archive / str(next_attempt(archive))
                aside.mkdir(parents=True)
                shutil.copy2(trial_dir / RECORD_FILE, aside / RECORD_FILE)
                _move(files, aside)
        return next_attempt(archive)

    def keep_experiment(self, text: str) -> Path | None:
        """Leave the experiment as experiment.yaml; returns the new path of an earlier one that means another, which is
        moved aside."""
        path = self.path / EXPERIMENT_FILE
        moved = None
        if os.path.lexists(path):
            with contextlib.suppress(OSError, ValueError):  # what cannot be read is another one
                if same_meaning(read_regular(path).decode(), text):
                    return None
            moved = path.rename(free_name(path))
        write_atomic(path, text)
        return moved


def round_of_files(trial_dir: Path) -> int:
    """The round that the files directly in a trial's directory belong to; 0 where there are none."""
    try:
        trial = read_json(trial_dir / TRIAL_FILE)
    except (OSError, ValueError):
        return 0
    number = trial.get("round", 1) if isinstance(trial, dict) else 0  # 1: from before there were rounds
    return number if isinstance(number, int) else 0


def _files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _move(paths: Sequence[Path], folder: Path) -> None:
    """trial.json last: after a stop half-way it still says which round the files are of."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(paths, key=lambda path: path.name == TRIAL_FILE):
        path.rename(folder / path.name)


def refuse_no_run(path: Path, marker: str = RUN_FILE) -> None:
    """Raise UsageError when DIR holds no run to resume; `marker` is the file that a run of this kind has."""
    if not os.path.exists(path / marker):
        raise UsageError(
            f"{path} holds no run to resume; leave out --resume and every option that implies it, "
            "or name the directory of a run with --out"
        )


@contextlib.contextmanager
def opened_for_writing(
    path: Path, *, resume: bool, marker: str = RUN_FILE
) -> Iterator[tuple[RunDirectory, Path | None]]:
    """Lock DIR against other runs. Yields it, and the new path of an earlier run that is not resumed (else None).

    `marker` is the file that makes a directory one of a run of this kind. Raises UsageError when another run holds DIR,
    when there is nothing to resume, or when DIR holds something that is not a run: that is neither overwritten nor
    moved.
    """
    is_run = os.path.exists(path / marker)
    if resume:
        refuse_no_run(path, marker)
    make_writable(path)
    if not is_run and any(entry.name != LOCK_FILE for entry in path.iterdir()):
        raise UsageError(f"{path} holds files that are not a run; give --out a new or an empty directory")

    moved: Path | None = None
    if is_run and not resume:
        if path.resolve() == Path.cwd():
            raise UsageError(
                f"{path} is the working directory, so the run in it is not moved aside; start from elsewhere"
            )
        with _lock(path):
            moved = free_name(path)
            make_writable(moved.parent)
            path.rename(moved)
        make_writable(path)
    with _lock(path):
        yield RunDirectory(path), moved


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """An advisory lock that the kernel drops when its holder dies, however that happens.

    On a file system that has none (Lustre and NFS may be mounted so), the holder that the file names stands for it.
    """
    path = directory / LOCK_FILE
    if os.path.lexists(path) and not path.is_file():
        raise UsageError(f"{path} is no regular file; remove it")
    with open(path, "a+", encoding="utf-8") as file:
        locked = try_lock(file)
        still_there = path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
        # Held, or moved away with its directory between opening and locking.
        if not still_there or not (locked or (locked is None and _holder_ended(file))):
            file.seek(0)
            raise UsageError(
                f"{directory} is in use by another run ({file.read().strip() or 'unknown'}); "
                + (f"its file system has no locks, so remove {path} if that run has ended, " if locked is None else "")
                + "wait for it, or give --out another directory"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the error that ends the run is reported, not this one
                file.truncate(0)


def _holder_ended(file: IO[str]) -> bool:
    """Whether the process that a lock file names is gone; False where this machine cannot see it."""
    file.seek(0)
    words = file.read().split()
    if len(words) != 4:
        return True  # the holder emptied it
    _, process, _, host = words
    return host == socket.gethostname() and (process == str(os.getpid()) or not Path("/proc", process).exists())


def next_attempt(archive: Path) -> int:
    """The number after the highest below `archive`: earlier ones may have been removed."""
    names = (path.name for path in archive.iterdir()) if archive.exists() else ()
    return 1 + max((int(name) for name in names if name.isascii() and name.isdecimal()), default=0)


def _describes_a_run(value: Any) -> bool:
    if not isinstance(value, dict) or not value.keys() >= RUN_FACTS:
        return False
    if not isinstance(value.get("rounds", 1), int):
        return False
    trials = value["trials"]
    names = isinstance(trials, list) and all(isinstance(name, str) and _is_name(name) for name in trials)
    return names and all(isinstance(value[fact], str) for fact in RUN_FACTS - {"trials"})


def _is_name(text: str) -> bool:
    return text not in ("", "..") and Path(text).name == text


def command_of(run_dir: Path, typed: Sequence[str]) -> list[str]:
    """The command line that made a run, for the directory where the run is now: it may have been renamed since, and
    another run be in its place. Of several `--out` the last one counts, so an abbreviated one does no harm."""
    words, parts = list[str](), iter(typed)
    for word in parts:
        if word == "--out":
            next(parts, None)
        elif not word.startswith("--out="):
            words.append(word)
    return [*words, "--out", str(run_dir)]


def free_name(path: Path) -> Path:
    """An unused name beside `path`, for moving it aside."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        candidate = path.with_name(f"{path.name}.{stamp}" + (f"-{number}" if number > 1 else ""))
        if not candidate.exists():
            return candidate
    raise AssertionError(f"a thousand runs in one second beside {path}")
