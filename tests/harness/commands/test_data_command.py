"""`burst train data`: what it builds, what it refuses, and that nothing is lost."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from engine.data import open_tokens
from harness.cli import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("first text, ", encoding="utf-8")
    Path("b.txt").write_text("second text", encoding="utf-8")
    return tmp_path


def test_texts_become_one_store_in_their_order(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "data", "a.txt", "b.txt", "--out", "deep/store", "--validation", "0.2"]) == 0
    store, step = capsys.readouterr().out.splitlines()
    assert store == "deep/store: 23 tokens of 2 documents, 4 of them held out; tokenizer bytes, vocabulary 256, uint8"
    assert step.startswith(f"Next: burst train CONFIG.yaml, with data: {here / 'deep' / 'store'}, model: tiny")
    assert bytes(open_tokens("deep/store").window(0, 23).tolist()) == b"first text, second text"
    header = json.loads(Path("deep/store/header.json").read_text())
    assert [source["name"] for source in header["sources"]] == ["a.txt", "b.txt"]
    assert [path.name for path in Path("deep").iterdir()] == ["store"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["a.txt", "--field", "text"],
            "--field text is for files of records (JSON Lines, JSON lists, Parquet, Arrow), and",
        ),
        (
            ["a.txt", "python_docs", "--field", "a"],
            "and data 'a.txt' holds text alone, as the others do; leave --field",
        ),
        (["no.txt", "--field", "text"], "data 'no.txt' is no file; give python_docs"),
        (["mark.txt"], "data 'mark.txt' is empty; give a text of at least one byte"),
        (["no.txt"], "data 'no.txt' is no file; give python_docs or the path of a UTF-8 text file"),
        (["a.txt", "empty.txt"], "data 'empty.txt' is empty; give a text of at least one byte"),
        (["a.txt", "binary.txt"], "data 'binary.txt' is not UTF-8 at byte 3; give a text file"),
        (["a.txt", "my.jsonl"], "data 'my.jsonl' looks like JSON Lines, whose syntax would be learnt as text"),
        (["my.txt.gz"], "data 'my.txt.gz' is a gzip file; unpack it and give the UTF-8 text files that it holds"),
        (["a.txt", "--tokenizer", "no.json"], "tokenizer 'no.json' cannot be read (No such file or directory)"),
        (["a.txt", "--tokenizer", "a.txt"], "tokenizer 'a.txt' is no Hugging Face tokenizer"),
        (
            ["a.txt", "--validation", "0.01"],
            "0.01 of 12 tokens is less than one token; give `burst train data` a larger --validation, or 0",
        ),
        (["a.txt", "--out", "folder"], "folder exists and is no token store; give --out a path that does not exist"),
        (["a.txt", "--out", "a.txt/store"], "a.txt is a file; give --out a directory"),
        (["x" * 5000], "data 'xxx"),
        (["a.txt", "--out", "x" * 5000], "no file can have so long a name"),
        (["a.txt", "--out", "/proc/x"], "/proc"),
        (["a.txt", "--tokenizer", "x" * 5000], "tokenizer 'xxx"),
        (["a.txt", "--tokenizer", "/dev/zero"], "tokenizer '/dev/zero' cannot be read (it is no regular file)"),
        (["a.txt", "--tokenizer", "pipe"], "tokenizer 'pipe' cannot be read (it is no regular file)"),
        (["a.txt", "--tokenizer", "large.json"], "tokenizer 'large.json' cannot be read (it is larger than 256 MiB)"),
        (["pipe"], "data 'pipe' is no file; give python_docs or the path of a UTF-8 text file"),
    ],
)
def test_what_cannot_be_built_is_one_sentence_and_leaves_nothing(here, capsys, arguments, words) -> None:
    if "--tokenizer" in arguments:
        pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
    Path("empty.txt").write_bytes(b"")
    Path("mark.txt").write_bytes(b"\xef\xbb\xbf")
    Path("binary.txt").write_bytes(b"abc\xff")
    Path("my.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    Path("my.txt.gz").write_bytes(gzip.compress(b"a text"))
    Path("folder").mkdir()
    os.mkfifo("pipe")
    with open("large.json", "wb") as file:
        file.truncate((256 << 20) + 1)
    before = sorted(here.rglob("*"))
    assert main(["train", "data", "--out", "store", "--validation", "0.2", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("burst: ")
    assert said.err.count("\n") == 1
    assert words in said.err
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("part", ["1", "-0.1", "half"])
def test_a_part_that_is_none_is_refused_by_its_option(here, capsys, part):
    with pytest.raises(SystemExit) as ended:
        main(["train", "data", "a.txt", "--out", "store", f"--validation={part}"])
    assert ended.value.code == 2
    assert f"{part!r} is no part from 0 to below 1" in capsys.readouterr().err


def test_a_replaced_store_is_moved_aside_and_comes_back_when_the_new_one_fails(here: Path, capsys) -> None:
    build = ["train", "data", "--out", "store", "--validation", "0", "--replace"]
    assert main([*build, "a.txt"]) == 0
    assert main([*build, "no.txt"]) == 2
    assert open_tokens("store").header.count == 12
    assert main([*build, "b.txt"]) == 0
    assert open_tokens("store").header.count == 11
    [moved] = [path for path in here.iterdir() if path.name.startswith("store.")]
    assert open_tokens(str(moved)).header.count == 12
    assert f"the earlier store is now {moved.name}\n" in capsys.readouterr().out
