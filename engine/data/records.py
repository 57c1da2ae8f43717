"""Files of records, of which one field is the text or the chat of a document: JSON Lines, JSON lists, Parquet, and the
Arrow files of Hugging Face `datasets`.

Parquet and Arrow need pyarrow, the extra `data`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from engine.data.chat import Message

Kind = Literal["json_lines", "json", "parquet", "arrow"]

_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can write one without its other half

# Types of values in words.
_TYPES = {
    type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a text", bytes: "bytes",
    list: "a list", dict: "an object",
}  # fmt: skip

MAX_JSON_BYTES = 1 << 30  # of a JSON list, which is in memory whole


def values_of(path: Path, kind: Kind, field: str) -> Iterator[tuple[str, str | list[Message]]]:
    """The field of each record: a text, or the messages of a chat. Each with its place, for errors.

    Raises ValueError for a record without the field, or with something else in it.
    """
    for number, record in enumerate(_records(path, kind, field), start=1):
        place = f"{path}:{number}" if kind == "json_lines" else f"record {number} of {path}"
        if record is None:  # a blank line
            continue
        if not isinstance(record, dict):
            raise ValueError(f"{place} is {_named(record)}; expected an object with the field {field!r}")
        if field not in record:
            found = ", ".join(map(str, record)) or "none"
            raise ValueError(f"{place} has no field {field!r}, its fields are {found}; give --field one of them")
        yield place, _checked(record[field], place, field)


def _checked(value: object, place: str, field: str) -> str | list[Message]:
    if isinstance(value, str):
        if not value.isascii() and (half := _SURROGATE.search(value)):
            raise ValueError(
                f"{place} has half a character, {half[0]!r}, in field {field!r}; write the text in whole characters"
            )
        return value
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        if all("role" in each and "content" in each for each in value):
            return value
        raise ValueError(
            f"{place} has messages without role or content in field {field!r}; expected objects with both, such as "
            '{"role": "user", "content": "..."}'
        )
    raise ValueError(f"{place} has {_named(value)} in field {field!r}; expected a text or a list of chat messages")


def _named(value: object) -> str:
    """A JSON value in words."""
    if value == []:
        return "an empty list"
    return _TYPES.get(type(value), f"a {type(value).__name__}")


def _records(path: Path, kind: Kind, field: str) -> Iterator[Any]:
    if kind == "json_lines":
        return _json_lines(path)
    if kind == "json":
        return _json_list(path)
    return columns(path, kind, field)


def _json_lines(path: Path) -> Iterator[Any]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            text = _decoded(line, f"{path}:{number}").lstrip("\ufeff").strip().lstrip("\x1e")
            try:
                yield json.loads(text) if text else None
            except (ValueError, RecursionError) as error:
                remedy = "repair or remove that line"
                if "\0" in text:
                    remedy = "convert the file to UTF-8, if it is UTF-16"
                elif "\r" in text:
                    remedy = "end lines with a line feed, not with a carriage return alone"
                raise ValueError(f"{path}:{number} is no JSON ({error}); {remedy}") from error


def _json_list(path: Path) -> Iterator[Any]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} is one JSON value of more than 1 GiB; write one record a line (JSON Lines)")
    try:
        found = json.loads(_decoded(path.read_bytes(), str(path)).lstrip("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); repair it") from error
    if not isinstance(found, list):
        raise ValueError(f"{path} is one JSON value, {_named(found)}; expected a list of records, or one record a line")
    return iter(found)


def _decoded(content: bytes, place: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 at byte {error.start}; convert it to UTF-8") from error


def columns(path: Path, kind: Kind, field: str) -> Iterator[dict[str, object]]:
    """Rows with that field alone; with the names of all fields where it is missing."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"data {str(path)!r} needs the pyarrow library, which cannot be imported here ({error}); install it with: "
            "pip install 'burst-harness[data]'"
        ) from error
    try:
        if kind == "parquet":
            file = pyarrow.parquet.ParquetFile(path)
            if field not in file.schema_arrow.names:
                yield dict.fromkeys(file.schema_arrow.names)
                return
            batches = file.iter_batches(columns=[field])
        else:
            source = pyarrow.memory_map(str(path))
            try:
                reader = pyarrow.ipc.open_stream(source)
            except pyarrow.ArrowInvalid:  # not a stream, but a file, which may be read in any order
                opened = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
                batches = (opened.get_batch(number) for number in range(opened.num_record_batches))
                names = opened.schema.names
            else:
                batches, names = reader, reader.schema.names
            if field not in names:
                yield dict.fromkeys(names)
                return
        for batch in batches:
            for value in batch.column(batch.schema.get_field_index(field)):
                yield {field: value.as_py()}
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system; pyarrow's own, for damaged metadata, has no number
        raise ValueError(
            f"data {str(path)!r} cannot be read ({' '.join(str(error).split())}); give it whole"
        ) from error
