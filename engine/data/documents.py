"""The documents of a source, one by one: a text file is one, a file of records has one in each, a folder those of its
files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias, cast

from engine.data.chat import Message
from engine.data.records import values_of
from engine.data.sources import PYTHON_DOCS, chunks_of, record_kind, text_unsupported_reason
from engine.reader import read_json

Text: TypeAlias = Iterable[bytes]  # UTF-8, cut anywhere
Chat: TypeAlias = list[Message]

_SPLITS_FILE, _STATE_FILE = "dataset_dict.json", "state.json"  # of a folder that `datasets` saved


def is_text_alone(source: str) -> bool:
    """Whether no file of a source has fields, by its first bytes and its name; not for one that cannot be read."""
    return source == PYTHON_DOCS or all(
        text_unsupported_reason(str(file)) is None and record_kind(file) is None for file in _files_of(Path(source))
    )


def documents_of(source: str, field: str | None) -> Iterator[tuple[str, Text | Chat]]:
    """Each document with its place, for errors.

    Args:
        source: `python_docs` (a document for each of its topics), a UTF-8 text file, a file of records, or a folder,
            whose files are read in the order of their paths; hidden ones are left out.
        field: of each record, its text or the messages of its chat.

    Raises ValueError for a source that cannot be read, or holds records while no field is given.
    """
    if source == PYTHON_DOCS:
        yield from ((PYTHON_DOCS, (topic,)) for topic in chunks_of(source))
        return
    for file in _files_of(Path(source)):
        kind = record_kind(file) if field is not None and os.path.isfile(file) else None
        if kind is None:
            yield str(file), chunks_of(str(file))
            continue
        for place, value in values_of(file, kind, cast(str, field)):
            yield place, (value.encode(),) if isinstance(value, str) else value


def _files_of(source: Path) -> list[Path]:
    return _files_in(source) if os.path.isdir(source) else [source]  # `os.path`: no name is too long for it


def _files_in(folder: Path) -> list[Path]:
    if (folder / _SPLITS_FILE).is_file():
        names = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise ValueError(
            f"data {str(folder)!r} holds the splits {', '.join(names)}; give one of them, such as "
            f"{str(folder / names[0]) if names else 'its train folder'!r}"
        )
    if (folder / _STATE_FILE).is_file():
        try:
            listed = cast(dict[str, list[dict[str, str]]], read_json(folder / _STATE_FILE))["_data_files"]
            if outside := [each["filename"] for each in listed if Path(each["filename"]).name != each["filename"]]:
                raise ValueError(f"{outside[0]!r} is no name of a file in it")
            return [folder / each["filename"] for each in listed]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{folder / _STATE_FILE} does not list the folder's files ({error}); save it anew"
            ) from error
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not files:
        raise ValueError(f"data {str(folder)!r} is a folder without files; give text files, or files of records")
    return files
