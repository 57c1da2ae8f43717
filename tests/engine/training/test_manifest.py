"""Which checkpoints count: whole ones, newest first, and never fewer than one."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.training.manifest import (
    Manifest,
    aside_path,
    checkpoint_path,
    checkpoints,
    damage,
    data_files,
    difference,
    file_facts,
    keep_newest,
    publish,
    read_manifest,
    set_aside,
    sweep,
    write_manifest,
)


def written(directory: Path, step: int, content: bytes = b"parameters") -> Path:
    """A checkpoint as `saving` leaves it, of one file."""
    aside = aside_path(directory, step)
    aside.mkdir(parents=True)
    (aside / "data.bin").write_bytes(content)
    files = file_facts(aside, data_files(aside))
    write_manifest(aside, Manifest(step=step, facts={"seed": 0}, model={}, files=files, software={}))
    return publish(directory, step)


def names(directory: Path) -> list[str]:
    return [path.name for path in checkpoints(directory)]


def test_a_checkpoint_is_there_only_once_it_was_published(tmp_path: Path) -> None:
    aside_path(tmp_path, 3).mkdir()
    assert names(tmp_path) == []
    sweep(tmp_path)
    path = written(tmp_path, 3)
    assert names(tmp_path) == ["step-00000003"]
    assert (tmp_path / "latest").read_text() == "step-00000003\n"
    assert damage(path, read_manifest(path).files) == ""


def test_newest_checkpoints_are_first_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (5, 100_000_000, 20):
        written(tmp_path, step)
    assert names(tmp_path) == ["step-100000000", "step-00000020", "step-00000005"]


DIFFERENCES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "": ({}, {"linear_dtype": "same", "lora": None, "z_loss": 0.0, "model.tied": False, "validation tokens": None}),
    "linear_dtype float8, and the run now has same": ({"linear_dtype": "float8"}, {"linear_dtype": "same"}),
    "linear_dtype same, and the run now has float8": ({}, {"linear_dtype": "float8"}),
    "optimizer_states 8bit, and the run now has null": ({"optimizer_states": "8bit"}, {"optimizer_states": None}),
    "z_loss 0.01, and the run now has 0.0": ({"z_loss": 0.01}, {"z_loss": 0.0}),
    "model.tied false, and the run now has true": ({}, {"model.tied": True}),
    "validation tokens 7, and the run now has none": ({"validation tokens": 7}, {"validation tokens": None}),
}


@pytest.mark.parametrize("words", DIFFERENCES)
def test_a_difference_is_told_as_files_have_it_and_newer_settings_had_their_defaults(words: str) -> None:
    assert difference(*DIFFERENCES[words]) == (words and f"it was made with {words}")


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_the_newest_stay_and_one_always_does(tmp_path: Path, count: int) -> None:
    for step in (1, 2, 3):
        written(tmp_path, step)
    keep_newest(tmp_path, count)
    assert names(tmp_path) == [f"step-0000000{step}" for step in (3, 2, 1)[: max(1, count)]]


def test_a_step_that_is_saved_again_replaces_what_had_its_name(tmp_path: Path) -> None:
    written(tmp_path, 2, b"first")
    path = written(tmp_path, 2, b"second")
    assert (path / "data.bin").read_bytes() == b"second"
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda file: file.write_bytes(b"parameterz"), "its file data.bin has changed since it was written"),
        (lambda file: file.write_bytes(b"param"), "its file data.bin has 5 bytes instead of 10"),
        (lambda file: file.unlink(), "its file data.bin cannot be read (No such file or directory)"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, harm, sentence: str) -> None:
    path = written(tmp_path, 1)
    harm(path / "data.bin")
    assert damage(path, read_manifest(path).files) == sentence


@pytest.mark.parametrize("content", [None, "", "{", "{}", "[]"])
def test_a_checkpoint_without_a_readable_manifest_is_no_checkpoint(tmp_path: Path, content: str | None) -> None:
    path = written(tmp_path, 1)
    (path / "checkpoint.json").unlink()
    if content is not None:
        (path / "checkpoint.json").write_text(content)
    with pytest.raises(ValueError, match=r"its checkpoint\.json (cannot be read|is not that of a checkpoint) \("):
        read_manifest(path)


def test_an_unusable_checkpoint_is_renamed_and_kept(tmp_path: Path) -> None:
    written(tmp_path, 1)
    kept = set_aside(checkpoint_path(tmp_path, 1))
    assert kept.name == "broken-step-00000001"
    assert (kept / "data.bin").exists()
    assert names(tmp_path) == []
