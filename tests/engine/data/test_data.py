"""Token stores and the batches read from them."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from engine.atomic import cache_dir
from engine.data import PYTHON_DOCS, open_tokens


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of its own for every test."""
    monkeypatch.setenv("BURST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def text_file(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    return str(path)


def test_the_built_in_text_is_the_language_reference_and_has_its_name() -> None:
    store = open_tokens(PYTHON_DOCS)
    text = bytes(store.window(0, store.header.count).tolist())
    assert b"compound statement" in text
    assert store.header.origin == "pydoc_data.topics"
    assert store.header.tokenizer == "bytes"
    assert store.header.sha256 == hashlib.sha256(text).hexdigest()


def test_tokens_of_a_file_are_its_bytes(tmp_path: Path) -> None:
    content = "naïve größe 試\n".encode()
    store = open_tokens(text_file(tmp_path, content))
    assert bytes(store.window(0, len(content)).tolist()) == content
    assert store.describe()["origin"] == "text.txt"


def test_a_window_past_the_end_starts_again(tmp_path: Path) -> None:
    store = open_tokens(text_file(tmp_path, b"abcde"))
    assert bytes(store.window(3, 12).tolist()) == b"deabcdeabcde"
    assert bytes(store.window(1_000_003, 4).tolist()) == b"deab"


def test_labels_are_the_next_tokens(tmp_path: Path) -> None:
    store = open_tokens(text_file(tmp_path, bytes(range(1, 101))))
    tokens, labels = store.batch(step=2, replica=0, dp_size=1, batch_size=2, seq_len=10)
    assert tokens.dtype == labels.dtype == torch.int64
    assert tokens.tolist() == [list(range(41, 51)), list(range(51, 61))]
    assert torch.equal(labels, tokens + 1)


def test_replicas_deal_the_sequences_one_replica_would_read(tmp_path: Path) -> None:
    store = open_tokens(text_file(tmp_path, bytes(range(1, 128))))
    alone, _ = store.batch(step=1, replica=0, dp_size=1, batch_size=4, seq_len=8)
    shared = [store.batch(step=1, replica=replica, dp_size=2, batch_size=2, seq_len=8)[0] for replica in (0, 1)]
    assert torch.equal(alone, torch.cat(shared))


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    source = text_file(tmp_path, b"first text")
    assert bytes(open_tokens(source).window(0, 5).tolist()) == b"first"
    text_file(tmp_path, b"another, longer text")
    assert bytes(open_tokens(source).window(0, 7).tolist()) == b"another"


def test_a_missing_file_is_refused_with_a_next_step() -> None:
    with pytest.raises(ValueError, match=r"such\.txt' is no file and no token store; give python_docs, the path of a"):
        open_tokens("/no/such.txt")


def test_an_empty_file_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match="is empty"):
        open_tokens(text_file(tmp_path, b""))
    assert list((cache / "tokens").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "byte"), [(b"good \xff bad", 5), (b"a" * ((1 << 20) - 1) + "é".encode() + b"\x80", (1 << 20) + 1)]
)
def test_text_that_is_not_utf8_is_refused_at_its_byte(tmp_path: Path, content: bytes, byte: int) -> None:
    with pytest.raises(ValueError, match=f"not UTF-8 at byte {byte};"):
        open_tokens(text_file(tmp_path, content))


def test_a_character_cut_off_at_the_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not UTF-8 at byte 3;"):
        open_tokens(text_file(tmp_path, b"abc\xc3"))


def test_a_damaged_store_is_refused_with_a_next_step(tmp_path: Path, cache: Path) -> None:
    source = text_file(tmp_path, b"some text")
    open_tokens(source)
    (header,) = cache.glob("tokens/*/header.json")
    header.write_text(json.dumps({**json.loads(header.read_text()), "count": 4}))
    with pytest.raises(ValueError, match="holds 9 tokens and its header says 4; remove it"):
        open_tokens(source)


def test_an_unwritable_cache_names_the_variable_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("BURST_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(ValueError, match="point BURST_CACHE at a writable directory"):
        open_tokens(PYTHON_DOCS)


def test_the_cache_follows_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BURST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/burst")


def _digest(source: str, barrier, results) -> None:
    barrier.wait()
    results.put(open_tokens(source).header.sha256)


def test_processes_that_race_end_with_one_store(tmp_path: Path, cache: Path) -> None:
    content = b"raced " * 200_000
    source = text_file(tmp_path, content)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.SimpleQueue()
    racers = [context.Process(target=_digest, args=(source, barrier, results)) for _ in range(4)]
    for racer in racers:
        racer.start()
    digests = {results.get() for _ in racers}
    for racer in racers:
        racer.join()
    assert digests == {hashlib.sha256(content).hexdigest()}
    assert len(list((cache / "tokens").iterdir())) == 1
