"""Locks on files, on file systems that have them and on those that have none."""

import errno
import fcntl
import os

import pytest

from cluster.files.errors import UsageError
from cluster.files.filesystem import try_lock
from cluster.ray_cluster.state import StateDirectory


def test_a_lock_has_one_holder(tmp_path):
    with open(tmp_path / "lock", "w") as first, open(tmp_path / "lock", "w") as second:
        assert try_lock(first) is True
        assert try_lock(second) is False
        assert try_lock(second, shared=True) is False


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_recognised(tmp_path, monkeypatch, number):
    """No file system here refuses a lock, so flock does."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with open(tmp_path / "lock", "w") as file:
        assert try_lock(file) is None
    with (
        pytest.raises(UsageError, match="is on a file system without locks; give --state a folder on another one"),
        StateDirectory(tmp_path).held("start a cluster"),
    ):
        pass


def test_a_file_system_that_fails_is_no_file_system_without_locks(tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with open(tmp_path / "lock", "w") as file, pytest.raises(OSError, match="Input/output error"):
        try_lock(file)
