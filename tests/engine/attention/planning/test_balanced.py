"""Documents dealt to ranks: equal tokens, nearly equal visible pairs, whole documents where they fit."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.attention.comm_plan import ring_tables
from engine.attention.geometry.balanced import Balanced
from engine.attention.geometry.dealing import deal
from engine.attention.geometry.layout import LAYOUTS, Ring, layout_named, tail_cut
from engine.attention.masks import Causal, Documents, Full, SlidingWindow, imbalance, kept_share, rank_areas
from engine.attention.masks.mask import FirstRows
from engine.attention.resolve import balanced, choose_layout
from tests.engine.attention.planning import measure_balance
from tests.positions import shard_positions

RANK_TOKENS = 4096


def drawn(kind: str, ranks: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of documents that fill a sequence."""
    chance, left, lengths = random.Random(f"{kind} {seed}"), ranks * RANK_TOKENS, []
    draw = {
        "one": lambda: left,
        "two": lambda: ranks * RANK_TOKENS * 3 // 8,
        "longer than a rank": lambda: RANK_TOKENS * 3 // 2,
        "short": lambda: chance.randint(20, 600),
        "lognormal": lambda: int(chance.lognormvariate(6, 1.5)),
        "pareto": lambda: int(100 * chance.paretovariate(1.1)),
        "half and crumbs": lambda: chance.choice((ranks * RANK_TOKENS // 2, 300, 200, 100)),
        "any": lambda: chance.randint(1, ranks * RANK_TOKENS // 4),
    }[kind]
    while left:
        lengths.append(max(1, min(left, draw())))
        left -= lengths[-1]
    return tuple(lengths)


KINDS = ("one", "two", "longer than a rank", "short", "lognormal", "pareto", "half and crumbs", "any")


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_has_equal_tokens_and_work_within_five_percent(kind: str) -> None:
    for ranks, causal, seed in itertools.product((2, 8, 64), (True, False), (0, 1)):
        mask = Documents(drawn(kind, ranks, seed), causal)
        seq_len = mask.tokens
        shards = [shard_positions(balanced(mask), seq_len, ranks, rank) for rank in range(ranks)]
        assert sorted(itertools.chain(*shards)) == list(range(seq_len))
        assert {len(shard) for shard in shards} == {RANK_TOKENS}
        areas = rank_areas(mask, balanced(mask), seq_len, ranks)
        assert (max(areas) - min(areas)) * ranks / sum(areas) <= 0.05, (ranks, causal, seed)


def spans_in(lengths: tuple[int, ...], seed: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Runs of positions in documents, of up to `longest` tokens."""
    chance, found, start = random.Random(seed), [], 0
    for length in lengths:
        at = start + chance.randint(0, max(1, length // 2))
        while (stop := at + chance.randint(2, longest)) <= start + length:
            found.append((at, stop))
            at = stop + chance.randint(1, 3 * longest)
        start += length
    return tuple(found)


@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_spans_inside_documents_are_counted(kind: str) -> None:
    for ranks, left in itertools.product((2, 8, 64), (0, 127, 1023, 4095)):
        lengths = drawn(kind, ranks, left)
        masks = [Documents(lengths, left=left), Documents(lengths, causal=False, left=left)]
        masks += [Documents(lengths, left=some, spans=spans_in(lengths, left, 600)) for some in (None, left)]
        for mask in masks:
            areas = rank_areas(mask, balanced(mask), mask.tokens, ranks)
            assert (max(areas) - min(areas)) * ranks / sum(areas) <= 0.05, (ranks, left, mask.causal, bool(mask.spans))


@pytest.mark.slow
@pytest.mark.parametrize("kind", measure_balance.LENGTHS)
def test_more_ranks_are_never_slower_by_the_cost_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of 1M tokens. Of 128K, 64 ranks are slower than 32: shards of 2K tokens need keys of most ranks."""
    for seed in range(34):
        lengths, seconds = measure_balance.drawn(kind, 1 << 20, seed), []
        for ranks in (8, 16, 32, 64):
            monkeypatch.setattr(measure_balance, "RANK_TOKENS", (1 << 20) // ranks)
            seconds.append(measure_balance.placed("balanced", lengths, ranks).auto_seconds)
        assert seconds == sorted(seconds, reverse=True), seed


def test_any_lengths_of_a_few_tokens_are_dealt() -> None:
    chance = random.Random(0)
    for _ in range(600):
        ranks, causal = chance.choice((1, 2, 3, 4, 8)), chance.random() < 0.5
        seq_len = ranks * chance.randint(1, 12)
        bounds = sorted({0, seq_len, *(chance.randrange(seq_len + 1) for _ in range(chance.randint(0, 9)))})
        lengths = tuple(stop - start for start, stop in itertools.pairwise(bounds))
        left = chance.choice((None, None, 0, 1, 3))
        spans = spans_in(lengths, seq_len, 4) if causal and chance.random() < 0.3 else ()
        layout = Balanced(lengths, causal, tail=chance.choice((1.0, 1.0, 0.4)), left=left, spans=spans)
        shards = [shard_positions(layout, seq_len, ranks, rank) for rank in range(ranks)]
        assert all(shard == sorted(shard) for shard in shards)
        assert {len(shard) for shard in shards} == {seq_len // ranks}
        assert sorted(itertools.chain(*shards)) == list(range(seq_len))


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_documents_that_fit_are_whole_on_a_rank_and_nothing_of_them_is_sent(ranks: int) -> None:
    lengths = (RANK_TOKENS // 4, RANK_TOKENS // 2) * ranks + (RANK_TOKENS // 4,) * ranks
    mask = Documents(lengths)
    used = ring_tables(mask, balanced(mask), Ring(cp_size=ranks, node_size=ranks), mask.tokens, False).used
    sent = used[..., 1] - used[..., 0]
    assert sent.sum() == sent.trace() == mask.tokens  # every rank uses its own chunk, all of it, and no other


@pytest.mark.parametrize("ranks", [8, 64])
def test_few_documents_are_cut_and_less_is_sent_than_by_zigzag(ranks: int) -> None:
    mask = Documents(drawn("short", ranks))
    starts = list(itertools.accumulate(mask.lengths, initial=0))
    segments = [balanced(mask).segments(mask.tokens, ranks, rank) for rank in range(ranks)]
    inner = {segment.start for each in segments for segment in each} - set(starts)
    assert len(inner) <= 2 * ranks < len(mask.lengths)
    sent = {}
    for layout in (balanced(mask), LAYOUTS["zigzag"]):
        used = ring_tables(mask, layout, Ring(cp_size=ranks, node_size=ranks), mask.tokens, False).used
        lengths = used[..., 1] - used[..., 0]
        sent[layout.name] = lengths.sum() - lengths.trace()
    assert sent["balanced"] < 0.9 * sent["zigzag"]


def test_one_causal_document_is_dealt_as_in_zigzag() -> None:
    layout, seq_len = balanced(Causal()), 1 << 14
    assert imbalance(Causal(), layout, seq_len, 8) < 1.001
    for rank in range(8):
        segments = layout.segments(seq_len, 8, rank)
        assert len(segments) <= 2
        assert segments[0].start < seq_len // 2 < segments[-1].start + segments[-1].count
    assert len(balanced(Full()).segments(seq_len, 8, 3)) == 1
    assert balanced(SlidingWindow(9)) == balanced(Causal())  # any other mask counts as one document


def test_repeated_documents_fill_any_length() -> None:
    mask = Documents((700, 300), repeat=True)
    assert balanced(mask).documents(2500) == (700, 300, 700, 300, 500)
    assert imbalance(mask, balanced(mask), 1 << 14, 8) <= 1.05


@pytest.mark.parametrize("tail", [0.25, 0.5])
def test_head_and_tail_are_each_dealt_evenly(tail: float) -> None:
    mask, ranks = Documents(drawn("lognormal", 8)), 8
    layout, cut = balanced(mask, tail), tail_cut(tail, mask.tokens, ranks)
    assert kept_share(layout, mask.tokens, ranks, cut) == pytest.approx(tail, rel=1e-3)
    assert imbalance(FirstRows(mask, cut), layout, mask.tokens, ranks) <= 1.05
    assert imbalance(mask, layout, mask.tokens, ranks) <= 1.05
    assert choose_layout(mask, mask.tokens, ranks, tail) == layout


def test_a_sequence_of_other_documents_is_refused() -> None:
    with pytest.raises(ValueError, match="deals 2 documents of 8 tokens and the sequence has 12; make a layout for"):
        Balanced((3, 5)).segments(12, 2, 0)
    with pytest.raises(ValueError, match=r"'balanced' needs the lengths of the documents; pass Balanced\(lengths\)"):
        layout_named("balanced")
    with pytest.raises(AssertionError, match="only lengths that divide"):
        deal((3, 4), 2)
