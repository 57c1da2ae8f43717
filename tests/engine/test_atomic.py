"""A reader of a file that is being written sees the old one or the whole new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.atomic import write_atomic
from engine.measurement import write_json


def test_folders_are_made_and_nothing_is_left_beside(tmp_path: Path) -> None:
    path = write_atomic(tmp_path / "a" / "b.txt", "größer")
    assert path.read_text(encoding="utf-8") == "größer"
    assert [entry.name for entry in path.parent.iterdir()] == ["b.txt"]


def test_a_failed_write_leaves_the_old_file_and_no_part_of_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_atomic(tmp_path / "b.txt", "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("b.txt", "old")]


def test_a_record_never_holds_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []
