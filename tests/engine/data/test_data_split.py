"""Held-out text and shuffled order: what is learnt from, once per epoch, never what is judged by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.data import TokenStore
from engine.data.sequences import ShuffledSequences, TokenSpan, permuted, spans
from engine.data.store import build_store
from engine.data.tokenizers import ByteTokenizer


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    """200 different bytes, the last 20 held out."""
    (tmp_path / "text").write_text("".join(map(chr, range(1, 128))) + "".join(map(chr, range(1, 74))), encoding="utf-8")
    build_store([str(tmp_path / "text")], tmp_path / "store", ByteTokenizer(), validation=0.1)
    return TokenStore(tmp_path / "store")


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 100, 1000])
def test_every_number_has_one_place(size: int) -> None:
    assert sorted(permuted(number, size, "key") for number in range(size)) == list(range(size))


def test_orders_differ_by_key_and_stay_the_same_for_ever() -> None:
    order = [permuted(number, 10, "0:0") for number in range(10)]
    assert order == [6, 7, 2, 3, 9, 8, 4, 5, 0, 1]  # a resumed run of an older version relies on it
    assert order != [permuted(number, 10, "0:1") for number in range(10)]


def test_large_orders_take_no_memory_and_no_time() -> None:
    size = 10**15
    assert len({permuted(number, size, "key") for number in range(1000)}) == 1000


def test_training_and_validation_text_share_no_token(store: TokenStore) -> None:
    learnt, held_out = spans(store.header, built=True)
    assert (learnt, held_out) == (TokenSpan(start=0, stop=180), TokenSpan(start=180, stop=200))


def test_a_text_without_a_store_of_its_own_has_its_last_part_held_out(store: TokenStore) -> None:
    header = replace(store.header, validation=0)
    assert spans(header, built=False) == (TokenSpan(start=0, stop=198), TokenSpan(start=198, stop=200))
    assert spans(header, built=True) == (TokenSpan(start=0, stop=200), TokenSpan(start=200, stop=200))


def test_a_sequence_needs_the_token_after_its_last_one() -> None:
    span = TokenSpan(start=10, stop=30)
    assert [span.sequences(seq_len) for seq_len in (9, 10, 19, 20, 100)] == [2, 1, 1, 0, 0]


def test_every_epoch_has_every_sequence_once_in_another_order(store: TokenStore) -> None:
    sequences = ShuffledSequences(store, spans(store.header, built=True)[0], seed=7)
    epochs = [[sequences.sequence(number, 16).tolist() for number in range(11 * epoch, 11 * epoch + 11)]
              for epoch in (0, 1)]  # fmt: skip
    whole = [store.window(16 * place, 17).tolist() for place in range(11)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(whole)
    assert epochs[0] != epochs[1] != whole != epochs[0]


def test_replicas_deal_the_sequences_that_one_replica_would_read(store: TokenStore) -> None:
    sequences = ShuffledSequences(store, spans(store.header, built=True)[0], seed=7)
    alone, labels = sequences.batch(step=1, replica=0, dp_size=1, batch_size=4, seq_len=16)
    shared = [sequences.batch(step=1, replica=r, dp_size=2, batch_size=2, seq_len=16)[0].tolist() for r in (0, 1)]
    assert alone.tolist() == shared[0] + shared[1]
    assert labels[:, :-1].tolist() == alone[:, 1:].tolist()


@pytest.mark.parametrize(
    ("validation", "held_out"),
    [(0.05, 5), (0.25, 5), (0.3, 5), (0.5, 5), (0.55, 12), (0.9, 17), (0.99, 17)],
)
def test_records_are_held_out_whole(tmp_path: Path, validation: float, held_out: int) -> None:
    """From the first one that begins behind the cut, or the last one: half of an answer is not learnt, and the other
    half evaluated."""
    lengths = (5, 5, 7, 5)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths))
    header = build_store([str(tmp_path / "a.jsonl")], tmp_path / "store", ByteTokenizer(), validation, field="text")
    assert header.validation == held_out


def test_a_single_record_is_cut(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 20}) + "\n")
    header = build_store([str(tmp_path / "a.jsonl")], tmp_path / "store", ByteTokenizer(), 0.25, field="text")
    assert header.validation == 5
