"""Texts to train on: the built-in one, or any UTF-8 file, as a stream of bytes.

Files that are no text are refused by their first bytes: a byte tokenizer accepts JSON, tables, archives and other
binary files, and a model would learn the syntax of the format instead of its content. Of files of records the refusal
names the command that takes a field of them (`engine.data.documents`). A text is never in memory whole.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from engine.data.records import Kind, columns

HEAD_BYTES = 1 << 16  # of a file that are read here

# First bytes of files that hold something other than text to train on. Source: each format's specification.
_ARCHIVES = {
    b"PK\x03\x04": "a zip archive",
    b"PK\x05\x06": "a zip archive",
    b"PK\x07\x08": "a zip archive",
    b"\x1f\x8b": "a gzip file",
    b"\x28\xb5\x2f\xfd": "a Zstandard file",
    b"\xfd7zXZ\x00": "an xz file",
    b"\x5d\x00\x00": "an LZMA file",
    b"\x04\x22\x4d\x18": "an LZ4 file",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a RAR archive",
    b"\xff\x06\x00\x00sNaPpY": "a Snappy file",
    b"!<arch>\n": "an ar archive",
}
_BZIP2 = re.compile(rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)")  # a block, or the end of an empty file
_SKIPPABLE_FRAME = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # of Zstandard and LZ4, before the first compressed one
_TAR_MAGIC, _TAR_OFFSET = b"ustar", 257
_DATA_SETS = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\xff\xff\xff\xff": "an Arrow stream",
    b"FEA1": "a Feather file",
    b"ORC\x0a": "an ORC file",
    b"Obj\x01": "an Avro file",
    b"\x93NUMPY": "a NumPy array",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"SQLite format 3\x00": "an SQLite database",
    b"GGUF": "a GGUF model",
    b"%PDF-": "a PDF document",
    b"%!PS": "a PostScript document",
    b"{\\rtf": "an RTF document",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "an Office document",
}
_PICKLE = re.compile(rb"\x80[\x02-\x05][\x28-\x95]")  # protocol 2 to 5, then an opcode

# Where the content does not distinguish a table from prose, or a damaged line from a text, the name does.
_BY_NAME = {
    ".parquet": "a Parquet file",
    ".arrow": "an Arrow file",
    ".jsonl": "JSON Lines",
    ".ndjson": "JSON Lines",
    ".json": "JSON",
    ".ipynb": "a Jupyter notebook",
    ".csv": "a table of comma-separated values",
    ".tsv": "a table of tab-separated values",
}

_SYNTAX = ", whose syntax would be learnt as text"
_TO_TEXT = "; write the text that it holds to UTF-8 text files, one per document"
_RECORD_FILES: dict[str, Kind] = {
    "a Parquet file": "parquet", "an Arrow file": "arrow", "an Arrow stream": "arrow",
}  # fmt: skip
_USUAL_FIELDS = ("text", "messages")
_JSON_KINDS: dict[str, Kind] = {"JSON Lines": "json_lines", "JSON": "json"}
_LINES_BY_NAME = (".jsonl", ".ndjson")

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_BYTE_ORDER_MARK = "\ufeff"
_RECORD_SEPARATOR = "\x1e"  # begins each text of a JSON text sequence (RFC 7464)
_RECORD = re.compile(r'[\s\x1e]*\{\s*["}]')  # the beginning of a line of JSON Lines
_JSON_STRING = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*'  # without its closing quote
_JSON_TOKEN = re.compile(
    rf'[\s\x1e]*+(?:[\[\]{{}}:,]|{_JSON_STRING}"|-?\d[-+.\deE]*|-?Infinity|NaN|true|false|null)[\s\x1e]*+'
)
_JSON_CUT = re.compile(rf"{_JSON_STRING}\\?|-|[-a-zA-Z]+")  # a token that the end of the head cuts


def format_unsupported_reason(path: Path) -> str | None:
    """One sentence why a file is no text to train on, or None. Reads only its first 64 KiB."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        return f"data {str(path)!r} cannot be read ({error.strerror}); give a UTF-8 text file"
    if found := _archive(head):
        return f"data {str(path)!r} is {found}; unpack it and give the UTF-8 text files that it holds"
    if found := _data_set(head):
        remedy = _take_field(path, head) if found in _RECORD_FILES else _TO_TEXT
        return f"data {str(path)!r} is {found}{remedy}"
    if head.startswith(_LFS_POINTER):
        return f"data {str(path)!r} is a pointer of Git LFS and not the file; fetch it with git lfs pull"
    if head.startswith(_UTF_16_MARKS):
        return f"data {str(path)!r} is UTF-16 text; convert it to UTF-8"
    if (zero := head.find(b"\0")) >= 0:
        return f"data {str(path)!r} is a binary file (byte {zero} is zero); give a UTF-8 text file"
    # A character cut by the end of the head is left out; other invalid UTF-8 is refused where the file is read whole.
    text = head.decode("utf-8", errors="ignore")
    if found := _json_kind(text, whole=len(head) < HEAD_BYTES):
        return f"data {str(path)!r} looks like {found}{_SYNTAX}{_take_field(path, head)}"
    if head and (found := _BY_NAME.get(path.suffix.lower())):
        name = f"data {str(path)!r} is {found} by its name{_SYNTAX}{_TO_TEXT}"
        return f"{name}, or rename it to .txt to learn it as it is"
    return None


def record_kind(path: Path) -> Kind | None:
    """What reads a file of records (`engine.data.records.Kind`), by its first bytes and its name; None for others."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    if (kind := _RECORD_FILES.get(_data_set(head) or "")) is not None:
        return kind
    if path.suffix.lower() in _LINES_BY_NAME:
        return "json_lines"
    return _JSON_KINDS.get(_json_kind(head.decode("utf-8", errors="ignore"), whole=len(head) < HEAD_BYTES) or "")


def _take_field(path: Path, head: bytes) -> str:
    """The end of the sentence about a file of records, with a field that the first of them has."""
    record = _first_record(path, head)
    documents = [name for name, value in record.items() if isinstance(value, str) or _is_chat(value)]
    # An id is a text too, and shorter than the document. A field whose value is not known may be a number.
    longest = max(documents, key=lambda name: len(str(record[name])), default="NAME")
    usual = [name for name in _USUAL_FIELDS if name in documents or (name in record and record[name] is None)]
    field = usual[0] if usual else longest
    line = shlex.join(["burst", "train", "data", str(path), "--field", field, "--out", "store"])
    return f"; make a store of one field with: {line}"


def _is_chat(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _first_record(path: Path, head: bytes) -> dict[str, object]:
    """The first record. Of Parquet and Arrow, and where the head does not hold it whole, its fields alone, with no
    values. Empty where it cannot be read: a command that reads the file says why."""
    try:
        if (kind := _RECORD_FILES.get(_data_set(head) or "")) is not None:
            return next(columns(path, kind, ""), {})  # no field has this name: all names are given
        text = head.decode("utf-8", errors="ignore")
        begin = text.index("{")
        try:
            found, _ = json.JSONDecoder().raw_decode(text, begin)
        except json.JSONDecodeError:
            return dict.fromkeys(_fields_of(text, begin))
        return cast(dict[str, object], found)
    except (ValueError, OSError, RecursionError):
        return {}


def _fields_of(text: str, at: int) -> list[str]:
    """The fields of the JSON object that begins at `at`, as far as the text has them; none of objects inside it."""
    fields, depth, before = [], 0, ""
    while match := _JSON_TOKEN.match(text, at):
        part, at = match[0].strip().strip(_RECORD_SEPARATOR), match.end()
        depth += (part in ("{", "[")) - (part in ("}", "]"))
        if depth == 0:
            break
        if depth == 1 and part == ":":
            fields.append(before.strip('"'))
        before = part
    return fields


def _archive(head: bytes) -> str | None:
    if head[_TAR_OFFSET:].startswith(_TAR_MAGIC):
        return "a tar archive"
    if _BZIP2.match(head):
        return "a bzip2 file"
    if _SKIPPABLE_FRAME.match(head):
        return "a Zstandard or LZ4 file"
    return next((name for magic, name in _ARCHIVES.items() if head.startswith(magic)), None)


def _data_set(head: bytes) -> str | None:
    if _PICKLE.match(head):
        return "a Python pickle"
    return next((name for magic, name in _DATA_SETS.items() if head.startswith(magic)), None)


def _json_kind(text: str, *, whole: bool) -> str | None:
    """`JSON Lines` or `JSON` when a text is that from its beginning, or nearly all of its lines are objects.

    Prose and code that show some JSON are neither. With `whole` False the text is the beginning of a longer one.
    """
    text = text.lstrip(_BYTE_ORDER_MARK)
    lines = [line for line in text.split("\n") if line.strip()]
    complete = lines if whole else lines[:-1]
    if len(lines) > 1 and _are_records(complete):
        return "JSON Lines"
    if text.lstrip().lstrip(_RECORD_SEPARATOR).startswith(("{", "[")) and _is_json_prefix(text, whole=whole):
        return "JSON"
    return None


def _are_records(lines: list[str]) -> bool:
    """Whether lines are objects, but for a header and damaged ones; or strings, all of them and more than one."""
    begun = sum(_RECORD.match(line) is not None for line in lines)
    if begun and 10 * begun >= 9 * len(lines):
        return 2 * sum(_holds(line, dict) for line in lines) >= len(lines)
    return len(lines) > 1 and all(line.lstrip().startswith('"') and _holds(line, str) for line in lines)


def _is_json_prefix(text: str, *, whole: bool) -> bool:
    """Whether a text consists of JSON's tokens alone; unless `whole`, its last one may be cut."""
    at = 0
    while match := _JSON_TOKEN.match(text, at):
        at = match.end()
    return at == len(text) or (not whole and _JSON_CUT.fullmatch(text, at) is not None)


def _holds(line: str, kind: type) -> bool:
    """Whether a line is one JSON value of that type."""
    try:
        return isinstance(json.loads(line.strip().lstrip(_RECORD_SEPARATOR)), kind)
    except (ValueError, RecursionError):  # not JSON, or a number or nesting beyond Python's limits
        return False


PYTHON_DOCS = "python_docs"  # the language reference that ships inside every Python (`pydoc_data.topics`)
_CHUNK_BYTES = 1 << 20


def chunks_of(source: str) -> Iterator[bytes]:
    """The bytes of a text, checked to be UTF-8 while they are read; without a byte order mark at its beginning.

    Args:
        source: `python_docs`, or the path of a text file.

    Raises:
        ValueError: the file is missing, of a format that is no text, or not UTF-8 (naming the first
            offending byte).
    """
    if source == PYTHON_DOCS:
        return _python_docs()
    if unsupported_reason := text_unsupported_reason(source):
        raise ValueError(unsupported_reason)
    return _utf8_file(Path(source))


def text_unsupported_reason(source: str) -> str | None:
    """One sentence why a source cannot be read as text, as far as its first bytes tell, or None."""
    if source == PYTHON_DOCS:
        return None
    if not os.path.isfile(source):  # which no name is too long for
        return f"data {source!r} is no file; give {PYTHON_DOCS} or the path of a UTF-8 text file"
    return format_unsupported_reason(Path(source))


def name_of(source: str) -> str:
    """The text's name without its folders, which mean nothing on another machine."""
    return "pydoc_data.topics" if source == PYTHON_DOCS else Path(source).name


def _python_docs() -> Iterator[bytes]:
    from pydoc_data.topics import topics  # half a megabyte of text: only where a store is built

    for topic in sorted(topics):
        yield topics[topic].strip().encode() + b"\n\n"


def _utf8_file(path: Path) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with open(path, "rb") as file:
        while True:
            chunk = file.read(_CHUNK_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"data {str(path)!r} is not UTF-8 at byte {done - pending + error.start}; give a text file"
                ) from error
            if not chunk:
                return
            yield chunk if done else chunk.removeprefix(codecs.BOM_UTF8)
            done += len(chunk)
