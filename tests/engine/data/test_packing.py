"""Documents packed into rows: every token once, no row too long, the same rows each time."""

from __future__ import annotations

import numpy as np
import pytest

from engine.data.packing import Packing, pack, padding_lengths, positions_of, shuffled

CHANCE = np.random.default_rng(3)
CASES = {
    "one document": [5],
    "one token each": [1, 1, 1],
    "whole rows": [16, 16, 32],
    "odd": [1, 2, 3, 17, 33, 5, 49, 16, 15],
    "long tail": np.ceil(np.exp(CHANCE.normal(2.0, 1.2, 400))).astype(int).tolist(),
    "none": [],
}


def packed(lengths: list[int], seq_len: int = 16, **how: object) -> Packing:
    starts = np.cumsum([0, *lengths])[:-1].astype(np.int64)
    return pack(starts, np.array(lengths, np.int64), seq_len, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["greedy", "best_fit"])
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
def test_every_token_with_a_label_is_in_one_row(lengths: list[int], rule: str) -> None:
    found = packed(lengths, rule=rule, seed=7)
    assert (found.tokens <= 16).all()
    labelled = []
    for row in range(len(found)):
        for start, length, ends in zip(*found.row(row), strict=True):
            labelled += range(start, start + length - ends)
    last = np.cumsum(lengths) - 1 if lengths else []
    assert sorted(labelled) == sorted(set(range(sum(lengths))) - set(map(int, last)))
    assert found.pairs().sum() == sum(int(n) * (int(n) + 1) // 2 for n in found.lengths)
    assert found.pairs(3).sum() == sum(min(at, 3) for n in found.lengths for at in range(1, int(n) + 1))


def test_a_document_that_fills_rows_leaves_no_token_without_its_label() -> None:
    found = packed([33])
    assert sorted(zip(found.starts.tolist(), found.lengths.tolist(), found.ends.tolist(), strict=True)) == [
        (0, 16, False), (16, 16, False),
    ]  # fmt: skip


def test_longer_documents_are_dropped_as_told() -> None:
    found = packed([5, 40, 16, 17], longer="drop")
    assert sorted(found.lengths) == [5, 16]
    assert (found.dropped_documents, found.dropped_tokens) == (2, 57)
    assert "2 longer documents are dropped (57 tokens)" in found.words


def test_best_fit_leaves_no_more_padding_than_greedy() -> None:
    lengths = CASES["long tail"]
    greedy, best = packed(lengths, 64, rule="greedy"), packed(lengths, 64, rule="best_fit")
    assert best.padding < greedy.padding
    labelled = best.tokens.sum()
    assert len(best) <= -(-labelled // 64) + 1  # short documents fill almost every row
    assert best.padding == pytest.approx(1 - labelled / (64 * len(best)))


def test_rows_follow_from_the_seed() -> None:
    def rows(seed: int) -> list[list[int]]:
        return [packed(CASES["odd"], seed=seed).row(number)[0].tolist() for number in range(3)]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


def test_the_order_is_that_of_every_version() -> None:
    assert shuffled(10, 0).tolist() == [2, 4, 6, 8, 5, 1, 7, 0, 9, 3]
    assert sorted(shuffled(1000, 5)) == list(range(1000))


def test_positions_restart_and_padding_is_short_documents() -> None:
    assert positions_of(np.array([3, 1, 2])).tolist() == [0, 1, 2, 0, 0, 1]
    assert padding_lengths(0) == []
    assert padding_lengths(600) == [256, 256, 88]


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([3, 4, 8], "3 documents in 2 rows of 8 tokens"),
        ([3, 1, 4], "2 documents in 1 rows of 8 tokens"),  # a single token has no label
        ([17, 20, 4], "3 documents (6 pieces) in "),
    ],
)
def test_documents_are_counted_before_they_are_cut(lengths: list[int], said: str) -> None:
    starts = np.cumsum([0, *lengths[:-1]])
    assert pack(starts, np.array(lengths), 8).words.startswith(said)
