"""Which checkpoints a run has, and whether one is whole. No torch: the harness reads them as well.

checkpoints/step-00000200/checkpoint.json   `Manifest`: written last, with size and hash of every other file
checkpoints/step-00000200/...               files of torch.distributed.checkpoint
checkpoints/latest                          name of the newest one, for other programs
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from engine.atomic import flush_to_disk, write_atomic
from engine.lora import Lora
from engine.reader import from_json, read_json
from engine.settings import TrialSettings
from engine.shape import ModelShape

MANIFEST_FILE = "checkpoint.json"
LATEST_FILE = "latest"
_NAME = re.compile(r"step-\d{8,}")
# Half written or half deleted. Only the run that holds the directory makes them, so it may delete them.
_ASIDE = re.compile(r"\.step-\d{8,}\.(part|old)")
# By the name of the fact: what a checkpoint was made with that is older than a setting.
_DEFAULTS = {
    prefix + each.name: each.default
    for prefix, settings in (("", TrialSettings), ("model.", ModelShape))
    for each in fields(settings)
    if each.default is not MISSING
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """One file as it was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Content of a checkpoint, and the facts it was made with."""

    step: int  # optimizer steps done
    facts: dict[str, object]  # that must be equal for a run to resume from it
    model: dict[str, object]  # the model's shape
    lora: Lora | None = None  # whose adapters alone are there; None: all parameters of the model
    files: dict[str, FileFacts]
    software: dict[str, str]


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def aside_path(directory: Path, step: int) -> Path:
    """Where a checkpoint is written before it is whole."""
    return directory / f".step-{step:08d}.part"


def checkpoints(directory: Path) -> list[Path]:
    """All checkpoints, newest first, whole or not."""
    if not directory.is_dir():
        return []
    named = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(named, key=step_of, reverse=True)


def read_manifest(path: Path) -> Manifest:
    """Raises ValueError when the checkpoint at `path` was not finished, or was written by another program."""
    try:
        return from_json(Manifest, read_json(path / MANIFEST_FILE))
    except OSError as error:
        raise ValueError(f"its {MANIFEST_FILE} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"its {MANIFEST_FILE} is not that of a checkpoint ({error})") from error


def read_whole(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are as they were written. Raises ValueError for any other."""
    manifest = read_manifest(path)
    if problem := damage(path, manifest.files):
        raise ValueError(problem)
    return manifest


def write_manifest(path: Path, manifest: Manifest) -> None:
    write_atomic(path / MANIFEST_FILE, json.dumps(asdict(manifest), indent=1, allow_nan=False) + "\n")


def data_files(path: Path) -> list[str]:
    """Names of all files but the manifest, in order."""
    return sorted(entry.name for entry in path.iterdir() if entry.is_file() and entry.name != MANIFEST_FILE)


def file_facts(path: Path, names: Iterable[str]) -> dict[str, FileFacts]:
    """Size and hash of some of a checkpoint's files."""
    facts = {}
    for name in names:
        with open(path / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            facts[name] = FileFacts(bytes=file.tell(), sha256=digest)
    return facts


def damage(path: Path, expected: Mapping[str, FileFacts]) -> str:
    """The first problem of some files, as the end of a sentence; empty when they are unchanged."""
    for name, facts in expected.items():
        try:
            found = file_facts(path, [name])[name]
        except OSError as error:
            return f"its file {name} cannot be read ({error.strerror})"
        if found.bytes != facts.bytes:
            return f"its file {name} has {found.bytes} bytes instead of {facts.bytes}"
        if found != facts:
            return f"its file {name} has changed since it was written"
    return ""


def is_complete(path: Path, manifest: Manifest) -> bool:
    """Whether all files of a checkpoint exist with the sizes they were written with. Reads none of them."""
    try:
        return all((path / name).stat().st_size == facts.bytes for name, facts in manifest.files.items())
    except OSError:
        return False


def difference(made: Mapping[str, object], now: Mapping[str, object]) -> str:
    """The first fact in which a checkpoint and a run differ, in words; empty when there is none."""
    for name in {**made, **now}:
        before, after = (facts.get(name, _DEFAULTS.get(name)) for facts in (made, now))
        if before != after:
            return f"it was made with {name} {_as_given(name, before)}, and the run now has {_as_given(name, after)}"
    return ""


def _as_given(name: str, value: object) -> str:
    """The value of a fact: of a setting as files of YAML have it."""
    if value is None and name not in _DEFAULTS:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def publish(directory: Path, step: int) -> Path:
    """Give the finished checkpoint in `aside_path` its name, in place of one that may have it, and point to it."""
    path, replaced = checkpoint_path(directory, step), directory / f".step-{step:08d}.old"
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    flush_to_disk(aside_path(directory, step))
    aside_path(directory, step).rename(path)
    flush_to_disk(directory)
    write_atomic(directory / LATEST_FILE, path.name + "\n")
    sweep(directory)
    return path


def keep_newest(directory: Path, count: int) -> None:
    """Delete all checkpoints but the newest `count`. To be called after one was written whole."""
    for path in checkpoints(directory)[max(1, count) :]:
        path.rename(path.with_name(f".{path.name}.old"))  # a half deleted one must not look like a checkpoint
    sweep(directory)


def broken_path(path: Path) -> Path:
    """The name of a checkpoint that cannot be used."""
    return path.with_name(f"broken-{path.name}")


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that cannot be used, so that it is neither counted nor lost; returns its new path."""
    broken = broken_path(path)
    shutil.rmtree(broken, ignore_errors=True)
    return path.rename(broken)


def sweep(directory: Path) -> None:
    """Remove checkpoints that earlier saves left half written or half deleted."""
    for path in directory.iterdir():
        if _ASIDE.fullmatch(path.name):
            shutil.rmtree(path)
