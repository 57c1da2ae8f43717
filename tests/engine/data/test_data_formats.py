"""Files that are no text are refused with what to do; books, source code and pages that show JSON are not."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import json
import lzma
import os
import pickle
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.data import open_tokens
from engine.data.sources import HEAD_BYTES, format_unsupported_reason

ROOT = Path(__file__).parents[3]
RECORDS = [{"text": f'Document {number} says "yes".\nIt ends.', "id": number} for number in range(400)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)
PROSE = "It was the best of times, it was the worst of times.\n" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURST_CACHE", str(tmp_path / "cache"))


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", PROSE)
    return buffer.getvalue()


def tarred() -> bytes:
    """Of text alone, so that all of it is UTF-8."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(PROSE)
        archive.addfile(member, io.BytesIO(PROSE.encode()))
    return buffer.getvalue()


def saved(write, value) -> bytes:
    buffer = io.BytesIO()
    write(buffer, value)
    return buffer.getvalue()


def written(tmp_path: Path, content: bytes | str, name: str = "my.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


ASCII_PDF = b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\nendobj\n"
NOT_TEXT = {
    "lines": (LINES, "looks like JSON Lines, whose syntax would be learnt as text; make a store of one"),
    "lines with a mark": ("\ufeff" + LINES, "looks like JSON Lines"),
    "lines with blank ones": (LINES.replace("\n", "\n\n"), "looks like JSON Lines"),
    "two short lines": ('{"text": "a"}\n{"text": "b"}\n', "looks like JSON Lines"),
    "lines with windows' ends": (LINES.replace("\n", "\r\n"), "looks like JSON Lines"),
    "lines with a header": ("# exported today\n" + LINES, "looks like JSON Lines"),
    "lines with a damaged one": (LINES.replace('"id": 3}', ""), "looks like JSON Lines"),
    "lines of strings": ('"one text"\n"another \\n text"\n', "looks like JSON Lines"),
    "lines of lists": ('["one text", 1]\n["another", NaN]\n', "looks like JSON"),
    "a text sequence": ("".join(f"\x1e{line}\n" for line in LINES.splitlines()), "looks like JSON Lines"),
    "one long line": (json.dumps({"text": PROSE * 200}), "looks like JSON"),
    "a list": (json.dumps(RECORDS), "looks like JSON"),
    "an indented list": (json.dumps(RECORDS, indent=2), "looks like JSON"),
    "an indented object": (json.dumps({"texts": RECORDS[:2]}, indent=2), "looks like JSON"),
    "a deep list": ("[" * 100_000, "looks like JSON"),
    "gzip": (gzip.compress(PROSE.encode()), "is a gzip file; unpack it and give the UTF-8 text files"),
    "bzip2": (bz2.compress(PROSE.encode()), "is a bzip2 file; unpack it"),
    "empty bzip2": (bz2.compress(b""), "is a bzip2 file; unpack it"),
    "xz": (lzma.compress(PROSE.encode()), "is an xz file; unpack it"),
    "lzma": (lzma.compress(PROSE.encode(), format=lzma.FORMAT_ALONE), "is an LZMA file; unpack it"),
    "zip": (zipped(), "is a zip archive; unpack it"),
    "tar": (tarred(), "is a tar archive; unpack it"),
    "zstandard": (b"\x28\xb5\x2f\xfd\x04", "is a Zstandard file; unpack it"),
    "skippable": (b"\x50\x2a\x4d\x18\x00", "is a Zstandard or LZ4 file; unpack it"),
    "parquet": (b"PAR1\x15\x04\x15", "is a Parquet file; make a store of one field with: burst train data "),
    "arrow": (b"ARROW1\x00\x00", "is an Arrow file; make a store of one field"),
    "arrow stream": (b"\xff\xff\xff\xff\x10\x00", "is an Arrow stream; make a store of one field"),
    "hdf5": (b"\x89HDF\r\n\x1a\n\x00", "is an HDF5 file; write the text"),
    "numpy": (saved(np.save, np.arange(3)), "is a NumPy array; write the text"),
    "several arrays": (saved(lambda file, value: np.savez(file, a=value), np.arange(3)), "is a zip archive"),
    "pickle": (pickle.dumps(RECORDS), "is a Python pickle; write the text"),
    "torch": (saved(lambda file, value: torch.save(value, file), torch.zeros(2)), "is a zip archive"),
    "pdf": (ASCII_PDF, "is a PDF document; write the text"),
    "rtf": (b"{\\rtf1\\ansi Hello}", "is an RTF document; write the text"),
    "zeros": (b"abc\x00def", "is a binary file (byte 3 is zero); give a UTF-8 text file"),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a pointer of Git LFS and not"
    ),
    "utf-16": ("text".encode("utf-16"), "is UTF-16 text; convert it to UTF-8"),
    "program": (Path(sys.executable).resolve().read_bytes()[:5000], "is a binary file (byte"),
}  # fmt: skip


CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"id": "0001", "messages": CHAT}, "messages"),
        ({"id": "a long name for a short text", "text": "short"}, "text"),
        ({"id": "0001", "body": PROSE, "tokens": [1] * 1000}, "body"),
        ({"tokens": [1, 2, 3]}, "NAME"),
    ],
)
def test_the_command_that_a_refusal_names_takes_a_field_that_is_there(record, field, tmp_path: Path) -> None:
    lines, whole = (written(tmp_path, text, name) for text, name in (
        ("\n".join([json.dumps(record)] * 3), "a.jsonl"), (json.dumps([record] * 3, indent=2), "a.json"),
    ))  # fmt: skip
    for path in (lines, whole):
        assert f" --field {field} --out store" in str(format_unsupported_reason(path))
    if field in ("text", "messages"):  # of a table the names alone are read
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        parquet = importlib.import_module("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
        assert f" --field {field} --out store" in str(format_unsupported_reason(tmp_path / "a.parquet"))


LONG = "word " * HEAD_BYTES


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"id": "0001", "text": LONG}, "text"),
        ({"id": "0001", "messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}, "messages"),
        ({"messages": CHAT, "text": LONG}, "text"),
        ({"id": "0001", "about": {"text": "short"}, "body": 'say "text": ' + LONG}, "NAME"),
    ],
)
def test_of_a_first_record_that_is_longer_than_the_head_a_usual_field_is_taken(record, field, tmp_path: Path) -> None:
    lines = written(tmp_path, "\n".join([json.dumps(record)] * 2), "a.jsonl")
    whole = written(tmp_path, json.dumps([record], indent=2), "a.json")
    for path in (lines, whole):
        assert f" --field {field} --out store" in str(format_unsupported_reason(path))


@pytest.mark.parametrize(
    ("record", "field"), [({"id": 1, "text": "short"}, "text"), ({"id": 1, "body": PROSE}, "NAME")]
)
def test_of_a_table_only_a_usual_field_is_taken_as_the_first_may_be_a_number(record, field, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = pyarrow.Table.from_pylist([record])
    importlib.import_module("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        assert f" --field {field} --out store" in str(format_unsupported_reason(tmp_path / name))


@pytest.mark.parametrize("kind", NOT_TEXT)
def test_a_file_that_is_no_text_is_refused_by_its_content_under_any_name(kind: str, tmp_path: Path) -> None:
    content, words = NOT_TEXT[kind]
    path = written(tmp_path, content)
    said = format_unsupported_reason(path)
    assert said is not None
    assert said.startswith(f"data {str(path)!r} ")
    assert words in said
    assert "\n" not in said
    with pytest.raises(ValueError, match=r"^data .*my\.txt"):
        open_tokens(str(path))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "A.CSV", "a.tsv", "a.ipynb", "a.parquet", "a.arrow"])
def test_where_the_content_cannot_tell_the_name_does_and_can_be_changed(name: str, tmp_path: Path) -> None:
    content = "name,text\n1,one\n2,two\n"
    said = format_unsupported_reason(written(tmp_path, content, name))
    assert said is not None
    assert said.endswith("one per document, or rename it to .txt to learn it as it is")
    assert format_unsupported_reason(written(tmp_path, content)) is None


TEXTS = {
    "a book": PROSE,
    "a book with a mark": "\ufeff" + PROSE,
    "a dialogue": '"Yes," he said.\n"No."\n"Well then."\n' * 50,
    "notes that begin with a reference": "[1] A. Author, A title.\n[2] B. Author, Another.\n",
    "a reference in brackets": "[1]\n\nSee above.\n",
    "a page with a link first": "[docs](docs/README.md) say more.\n",
    "a page that shows JSON": 'Send this:\n\n```json\n{"text": "hello"}\n```\n',
    "a short page of JSON": 'Send:\n{"text": "hello"}\n',
    "a page of examples": "Examples follow.\n" + '{"text": "hello"}\nand then\n' * 30,
    "a page with settings before it": '{\n  "title": "A page"\n}\n\nText follows here.\n',
    "a script": '{ "use strict"; let a = 1; }\n',
    "an object of a script": "{\n  title: 'A page',\n}\n",
    "a template": "{% extends 'base' %}\n{{ title }}\n",
    "capitals": "PARENTS AND CHILDREN\n\nORCHESTRA\n\nBZh, PK, Obj\n",
    "digits": "1 2 3\n4 5 6\n",
    "one word": "x",
    "a form feed and an escape": "page\x0cpage \x1b[1mbold\x1b[0m\n",
    "a long text with a zero far inside": "a" * HEAD_BYTES + "\x00 and on",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_text_is_learnt_from_even_when_it_begins_like_a_format(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path, TEXTS[kind])
    assert format_unsupported_reason(path) is None
    store, text = open_tokens(str(path)), path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    assert store.header.count == len(text)
    assert bytes(store.window(0, len(text)).tolist()) == text


def test_no_source_file_and_no_page_of_this_project_is_refused() -> None:
    tree = [path for folder in ("engine", "harness", "docs", "tests") for path in (ROOT / folder).rglob("*.*")]
    texts = [path for path in tree if path.suffix in (".py", ".md", ".j2", ".yaml")]
    assert len(texts) > 300
    assert {path: said for path in texts if (said := format_unsupported_reason(path))} == {}


def test_a_store_that_was_built_of_such_a_file_before_is_not_used(tmp_path: Path) -> None:
    path = written(tmp_path, PROSE)
    stamp = path.stat()
    open_tokens(str(path))
    path.write_text(("[" * 100_000)[: stamp.st_size])
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(ValueError, match="looks like JSON"):
        open_tokens(str(path))
