"""What `burst run` does with a directory that is already there."""

import errno
import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from harness.base.errors import UsageError
from harness.run.directory import LOCK_FILE, RunDirectory, opened_for_writing


def test_a_new_directory_is_made_and_held(tmp_path):
    path = tmp_path / "runs" / "x"
    with opened_for_writing(path, resume=False) as (directory, moved):
        assert moved is None
        assert directory.in_use()
        with (
            pytest.raises(UsageError, match=r"in use by another run \(process \d+ on "),
            opened_for_writing(path, resume=False),
        ):
            pass
    assert not directory.in_use()


@pytest.fixture
def without_locks(monkeypatch) -> None:
    """As on Lustre mounted without flock: no file system here refuses a lock."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_without_locks_the_lock_file_tells_of_a_run_that_lives(tmp_path, without_locks):
    path = tmp_path / "x"
    with opened_for_writing(path, resume=False) as (directory, _):
        directory.describe(experiment="x")
        assert not directory.in_use()  # by another process
        own = (path / LOCK_FILE).read_text()
    with subprocess.Popen(["sleep", "600"]) as other:
        (path / LOCK_FILE).write_text(own.replace(f"process {os.getpid()} ", f"process {other.pid} "))
        assert directory.in_use()
        with (
            pytest.raises(UsageError, match=rf"process {other.pid} on .*no locks, so remove .*\.lock if that run has"),
            opened_for_writing(path, resume=True),
        ):
            pass
        other.kill()
    assert not directory.in_use()
    with opened_for_writing(path, resume=True):
        pass
    (path / LOCK_FILE).write_text("process 1 on another-host\n")
    assert directory.in_use()


def test_an_earlier_run_is_moved_aside_whole(tmp_path):
    path = tmp_path / "x"
    with opened_for_writing(path, resume=False) as (directory, _):
        directory.describe(experiment="x")
        (path / "notes.txt").write_text("mine")
    for _ in range(2):  # twice within one second
        with opened_for_writing(path, resume=False) as (directory, moved):
            assert moved is not None
            assert not (path / "notes.txt").exists()
            directory.describe(experiment="x")
    kept = [other for other in tmp_path.iterdir() if (other / "notes.txt").exists()]
    assert [other.name.startswith("x.") for other in kept] == [True]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_directory_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="holds files that are not a run"), opened_for_writing(tmp_path, resume=False):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(UsageError, match="is a file"), opened_for_writing(tmp_path / "x", resume=False):
        pass


def test_resuming_where_nothing_ran_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no run to resume"), opened_for_writing(tmp_path / "x", resume=True):
        pass
    assert not (tmp_path / "x").exists()


def test_resuming_keeps_what_is_there(tmp_path):
    with opened_for_writing(tmp_path / "x", resume=False) as (directory, _):
        directory.describe(experiment="x", trials=[], started_at="now")
    with opened_for_writing(tmp_path / "x", resume=True) as (directory, moved):
        assert (moved, directory.description()["experiment"]) == (None, "x")


def test_each_attempt_starts_empty_and_keeps_the_earlier_ones(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.begin_attempt("t") == 1
    for attempt in (1, 2):
        (directory.trial("t") / "logs").mkdir()
        (directory.trial("t") / "logs" / "rank0.log").write_text(f"attempt {attempt}")
        assert directory.begin_attempt("t") == attempt + 1
    assert [path.name for path in directory.trial("t").iterdir()] == ["attempts"]
    for attempt in (1, 2):
        log = directory.trial("t") / "attempts" / str(attempt) / "logs" / "rank0.log"
        assert log.read_text() == f"attempt {attempt}"


def test_a_directory_without_a_run_has_no_description(tmp_path):
    with pytest.raises(UsageError, match="is not the directory of a run"):
        RunDirectory(tmp_path).description()


def test_the_working_directory_is_not_moved_away_from_under_its_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with opened_for_writing(Path(), resume=False) as (directory, _):
        directory.describe(experiment="x")
    with pytest.raises(UsageError, match="is not moved aside"), opened_for_writing(Path(), resume=False):
        pass
    assert (tmp_path / "run.json").exists()
