"""Documents of one packed sequence dealt to ranks: equal tokens, nearly equal visible pairs, few bytes. No torch.

`deal` gives every rank the same number of tokens and, as near as lengths allow, the same number of visible (query,
key) pairs. A document that fits on a rank lies there whole, so that nothing of it is sent. A document with too many
pairs for one rank is cut from its end: the rank with its last tokens receives the keys before them, the others receive
nothing for it.

**Ranks are filled one after the other**, each from both ends of the documents sorted by length: a long document, which
has more pairs for each of its tokens than the mean, then short ones, which have fewer. The last tokens of a rank may
come from two places of a document, its beginning and its end: with the number of tokens fixed, moving one of them from
the end to the beginning changes the pairs by a constant, so both counts are met exactly. With one causal document this
is zigzag. What is left of a document goes to the next rank, which is near in the ring. A rank's target is the mean of
what is left, so that an error of one rank is shared by all later ones.

Heavy work is paired with light work as in zigzag (Llama 3, arXiv:2407.21783); documents are whole where they fit and
cut where they do not, as in block placement (FCP, arXiv:2605.08524).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from engine.attention.geometry.layout import Segment, merged, tail_cut

__all__ = ["Balanced", "deal"]

NEAR = 0.01  # of the mean, by which pairs of a rank may differ from it
SLACK = 0.004  # of a rank's pairs, which may be missed where a document is then cut in one place instead of two


@dataclass(frozen=True, slots=True)
class Balanced:
    """Documents dealt to ranks so that all have equal tokens and nearly equal visible pairs.

    Any mask may be used with it; ranks have equal work under the mask `Documents` of the same lengths.

    Args:
        lengths: tokens of each document, in the order of the sequence; none: one document fills the sequence.
        causal: a token sees only earlier keys of its document.
        repeat: the lengths start again until the sequence is full, and the last document is cut short.
        tail: fraction of the sequence, from its end, that is dealt by itself, as what comes before it: both evenly.
    """

    lengths: tuple[int, ...] = ()
    causal: bool = True
    repeat: bool = False
    tail: float = 1.0
    name: str = "balanced"
    _hash: int = field(init=False, repr=False, compare=False)  # formed once: plans are looked up by layouts

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.lengths, self.causal, self.repeat, self.tail)))

    def __hash__(self) -> int:
        return self._hash

    def of_documents(self, lengths: tuple[int, ...], causal: bool, repeat: bool) -> Balanced:
        """This layout of a sequence of other documents."""
        return replace(self, lengths=lengths, causal=causal, repeat=repeat)

    def chunks(self, cp_size: int) -> int:
        return cp_size

    def segments(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Segment, ...]:
        """Raises ValueError when the documents do not have `seq_len` tokens."""
        return _dealt(self, seq_len, cp_size)[cp_rank]

    def documents(self, seq_len: int) -> tuple[int, ...]:
        """Lengths of the documents of a sequence. Raises ValueError when they do not sum to it."""
        if not self.lengths:
            return (seq_len,)
        lengths, tokens = self.lengths, sum(self.lengths)
        if self.repeat:
            lengths, left = lengths * (seq_len // tokens), seq_len % tokens
            for length in self.lengths if left else ():
                lengths += (min(length, left),)
                left -= lengths[-1]
                if not left:
                    break
        elif tokens != seq_len:
            raise ValueError(
                f"layout balanced deals {len(lengths)} documents of {tokens} tokens and the sequence has {seq_len}; "
                "make a layout for its own documents"
            )
        return lengths


@lru_cache(maxsize=64)
def _dealt(layout: Balanced, seq_len: int, cp_size: int) -> tuple[tuple[Segment, ...], ...]:
    if cp_size == 1:
        return ((Segment(0, seq_len),),)
    lengths, cut = layout.documents(seq_len), tail_cut(layout.tail, seq_len, cp_size)
    parts = [
        deal(lengths, cp_size, causal=layout.causal, begin=begin, end=end)
        for begin, end in ((0, cut), (cut, seq_len))
        if begin < end
    ]
    return tuple(merged(itertools.chain(*of_rank)) for of_rank in zip(*parts, strict=True))


@dataclass(slots=True)
class _Rest:
    """What is left of a document: its tokens [first, last)."""

    start: int  # global position of the document
    length: int  # of the whole document
    first: int
    last: int

    @property
    def tokens(self) -> int:
        return self.last - self.first


@dataclass(slots=True)
class _Shard:
    """What a rank has been given."""

    whole: list[tuple[int, int]] = field(default_factory=list)  # global position and length of whole documents
    parts: list[_Rest] = field(default_factory=list)  # of documents that are cut

    def all_parts(self) -> list[_Rest]:
        """Whole documents among the parts, to be cut."""
        self.parts += [_Rest(start, length, 0, length) for start, length in self.whole]
        self.whole = []
        return self.parts

    def segments(self) -> tuple[Segment, ...]:
        runs = self.whole + [(part.start + part.first, part.tokens) for part in self.parts]
        return merged(itertools.starmap(Segment, sorted(runs)))


@dataclass(slots=True)
class _Dealer:
    """The documents that are left, and the rank that is being filled."""

    causal: bool
    lengths: list[int]  # of whole documents, ascending
    starts: list[int]  # of the same documents
    cut: list[_Rest] = field(default_factory=list)  # documents of which some rank has a part
    size: int = 0  # tokens of a rank
    tokens: int = 0  # that the rank still takes
    pairs: float = 0.0
    light: float = 0.0  # pairs of a token, over the documents with the fewest that could fill the rank
    slack: float = 0.0
    shard: _Shard = field(default_factory=_Shard)

    def between(self, rest: _Rest, first: int, last: int) -> float:
        return _pairs(rest, self.causal, first, last)

    def whole(self, at: int) -> _Rest:
        return _Rest(self.starts[at], self.lengths[at], 0, self.lengths[at])

    def remove(self, at: int) -> None:
        del self.lengths[at], self.starts[at]

    @property
    def excess(self) -> float:
        """Pairs that the rank needs beyond those of the lightest tokens that could fill it."""
        return self.pairs - self.tokens * self.light

    def excess_of(self, rest: _Rest) -> float:
        return self.between(rest, rest.first, rest.last) - rest.tokens * self.light

    def take(self, rest: _Rest, first: int, last: int) -> None:
        """Give the rank tokens [first, last) of a document."""
        if first < last:
            self.shard.parts.append(_Rest(rest.start, rest.length, first, last))
            self.tokens -= last - first
            self.pairs -= self.between(rest, first, last)

    def fill(self, tokens: int, pairs: float) -> _Shard:
        """One rank: so many tokens, and about so many pairs."""
        self.size, self.tokens, self.pairs, self.slack, self.shard = tokens, tokens, pairs, SLACK * pairs, _Shard()
        self.light = self.lightest(tokens)
        self.take_rests()
        self.take_whole_documents()
        while self.tokens:
            self.close()
        return self.shard

    def lightest(self, tokens: int) -> float:
        """Pairs per token of the documents with the fewest, enough of them to fill a rank of so many tokens."""
        rests = sorted(((self.density(rest), rest.tokens) for rest in self.cut), reverse=True)
        left, pairs, next_rest = tokens, 0.0, rests[-1][0] if rests else math.inf
        for length in self.lengths:
            density = (length + 1) / 2 if self.causal else length
            while next_rest <= density and left:
                lower, count = rests.pop()
                count = min(count, left)
                pairs, left, next_rest = pairs + lower * count, left - count, rests[-1][0] if rests else math.inf
            if length >= left:
                return (pairs + density * left) / tokens
            pairs += density * length
            left -= length
        while rests and left:
            lower, count = rests.pop()
            count = min(count, left)
            pairs, left = pairs + lower * count, left - count
        return pairs / tokens

    def density(self, rest: _Rest) -> float:
        return (rest.first + rest.last + 1) / 2 if self.causal else float(rest.length)

    def take_rests(self) -> None:
        """Take what is left of cut documents where it fits, and a part of a heavy one that does not."""
        for rest in list(self.cut):
            if rest.tokens <= self.tokens and self.excess_of(rest) <= self.excess + self.slack:
                self.take(rest, rest.first, rest.last)
                self.cut.remove(rest)
        mean = self.pairs / self.tokens if self.tokens else math.inf
        heavy = max(self.cut, key=self.density, default=None)
        if (heavy is None or self.density(heavy) <= mean) and self.lengths:
            longest = self.whole(-1)
            if (
                self.density(longest) > mean
                and self.excess_of(longest) > self.excess + self.slack
                and not self.shard.parts
            ):
                self.remove(-1)
                self.cut.append(longest)
                heavy = longest
        if heavy is not None and self.density(heavy) > mean and self.excess > self.slack:
            self.take_heavy(heavy)

    def take_heavy(self, rest: _Rest) -> None:
        """Take the tokens at the end of a document that have the rank's excess; more tokens, of which some are at its
        beginning, where otherwise too many light ones would be left for the ranks that the rest can fill."""
        excess = self.excess
        count = self.from_end(rest)
        ranks = (self.excess_of(rest) - excess) / excess  # that have room for the rest by its pairs
        count = max(count, math.ceil(rest.tokens - max(0.0, ranks) * self.size))
        self.take_ends(rest, min(count, self.tokens, rest.tokens), excess)

    def take_ends(self, rest: _Rest, count: int, excess: float) -> None:
        """Take `count` tokens of a document from its end and its beginning that have so much excess."""
        end = self.between(rest, rest.last - count, rest.last)
        missing = end - (excess + count * self.light)
        each = rest.tokens - count if self.causal else 0  # pairs less for a token that moves to the beginning
        begin = 0
        if 2 * count <= rest.tokens and abs(missing - each * count) <= self.slack:
            begin = count  # the rank with the others receives fewer keys
        elif missing > self.slack and each:
            begin = min(count, round(missing / each))
            if missing >= each * count - self.slack:
                begin = count
        self.take(rest, rest.first, rest.first + begin)
        self.take(rest, rest.last - (count - begin), rest.last)
        rest.first, rest.last = rest.first + begin, rest.last - (count - begin)
        if not rest.tokens:
            self.cut.remove(rest)

    def from_end(self, rest: _Rest) -> int:
        """Tokens at the end of a document that have the rank's excess; all of them where they have less."""
        if self.causal:
            top = rest.last + 0.5 - self.light
            inside = top * top - 2 * self.excess
            count = top - math.sqrt(inside) if top > 0 and inside > 0 else rest.tokens
        else:
            more = rest.length - self.light
            count = self.excess / more if more > 0 else rest.tokens
        return min(rest.tokens, round(count))

    def take_whole_documents(self) -> None:
        """Take the longest document that leaves the rank no lighter tokens to find than there are, and so on. Where
        only light ones fit and the rank lacks pairs, take a part of the shortest that does not fit."""
        lengths, starts, causal, light, taken = self.lengths, self.starts, self.causal, self.light, self.shard.whole
        half, times = (light - 0.5, 2) if causal else (light / 2, 1)
        tokens, excess, lacks = self.tokens, self.excess + self.slack, 3 * self.slack
        while tokens and lengths:
            fits = half + math.sqrt(max(0.0, half * half + times * excess))
            at = bisect_right(lengths, fits if fits < tokens else tokens) - 1
            if excess > lacks and (at < 0 or lengths[at] < times * (excess / tokens + light)):
                lacks, place = math.inf, bisect_right(lengths, fits)
                if place < len(lengths):
                    self.tokens, self.pairs = tokens, excess - self.slack + tokens * light
                    rest = self.whole(place)
                    self.remove(place)
                    self.cut.append(rest)
                    self.take_heavy(rest)
                    tokens, excess = self.tokens, self.excess + self.slack
                    continue
            if at < 0:
                break
            length = lengths.pop(at)
            taken.append((starts.pop(at), length))
            tokens -= length
            excess -= length * (((length + 1) / 2 if causal else length) - light)
        self.pairs = excess - self.slack + tokens * light
        self.tokens = tokens

    def close(self) -> None:
        """Fill the rank from one document, which has the pairs that are missing; or take one that is too short."""
        found, at = min(self.cut, key=lambda rest: (max(self.gap(rest), self.slack), rest.last), default=None), None
        if self.lengths and (found is None or self.gap(found) > self.slack):
            for each in self.places():
                rest = self.whole(each)
                if found is None or max(self.gap(rest), self.slack) < max(self.gap(found), self.slack):
                    found, at = rest, each
        assert found is not None, "documents have as many tokens as the ranks"
        if at is not None:
            self.remove(at)
            self.cut.append(found)
        count = min(found.tokens, self.tokens)
        self.take_ends(found, count, self.pairs - (self.tokens - count) * self.light - count * self.light)

    def places(self) -> tuple[int, ...]:
        """Whole documents that may fill the rank: the shortest that is long enough, and the two around the shortest
        that has the missing pairs at its end; of one that no rank could take the rest of, around the mean."""
        mean = self.pairs / self.tokens
        wanted = max(self.tokens, mean + self.tokens / 2 if self.causal else mean)
        if wanted > self.size and self.causal:
            wanted = max(wanted, 2 * mean)
        last = len(self.lengths) - 1
        place = min(bisect_left(self.lengths, wanted), last)
        return min(bisect_left(self.lengths, self.tokens), last), max(0, place - 1), place

    def gap(self, rest: _Rest) -> float:
        """Pairs by which the rank misses its target when this document fills it; worse where it is too short."""
        count = min(rest.tokens, self.tokens)
        begin = self.between(rest, rest.first, rest.first + count)
        end = self.between(rest, rest.last - count, rest.last)
        wanted = self.pairs - (self.tokens - count) * self.light
        return max(begin - wanted, wanted - end, 0.0) + (self.tokens - count) * self.light


def deal(
    lengths: Sequence[int], ranks: int, *, causal: bool = True, begin: int = 0, end: int | None = None
) -> tuple[tuple[Segment, ...], ...]:
    """The positions of each rank, ascending: the same on every rank.

    Args:
        lengths: tokens of the documents, in the order of the sequence.
        causal: a token sees only earlier keys of its document.
        begin, end: deal only the tokens at positions [begin, end), whose number is a multiple of `ranks`; by default
            all.
    """
    ends = list(itertools.accumulate(lengths))
    starts = [stop - length for stop, length in zip(ends, lengths, strict=True)]
    end = ends[-1] if end is None else end
    assert (end - begin) % ranks == 0, "the layout splits only lengths that divide"
    # Documents that begin or end outside are cut already.
    first, last = bisect_right(ends, begin), bisect_left(starts, end)
    cut = [
        _Rest(starts[at], lengths[at], max(0, begin - starts[at]), min(lengths[at], end - starts[at]))
        for at in {first, last - 1}
        if starts[at] < begin or ends[at] > end
    ]
    whole = [at for at in range(first, last) if starts[at] >= begin and ends[at] <= end]
    whole.sort(key=lengths.__getitem__)
    dealer = _Dealer(causal, [lengths[at] for at in whole], [starts[at] for at in whole], cut)
    left = sum(length * (length + 1) / 2 if causal else float(length * length) for length in dealer.lengths)
    left += sum(_pairs(rest, causal, rest.first, rest.last) for rest in cut)
    dealt, areas, size = [], [], (end - begin) // ranks
    for rank in range(ranks):
        pairs = left / (ranks - rank)
        dealt.append(dealer.fill(size, pairs))
        areas.append(pairs - dealer.pairs)
        left -= areas[-1]
    _even_out(dealt, areas, causal)
    # The keys that a rank lacks of a long document are then those of the ranks before it, whose chunks come first.
    return tuple(shard.segments() for shard in reversed(dealt))


def _even_out(dealt: list[_Shard], areas: list[float], causal: bool) -> None:
    """Exchange tokens between the ranks with the most and the fewest pairs until all are near the mean. `areas` are the
    pairs of each rank."""
    mean = sum(areas) / len(areas)
    near = NEAR * mean
    for _ in range(4 * len(areas)):
        most, least = max(areas), min(areas)
        if max(most - mean, mean - least) <= near:
            return
        heavy, light = areas.index(most), areas.index(least)
        pairs = min(most - mean, mean - least) + 0.9 * near
        moved = _exchange(dealt[heavy].all_parts(), dealt[light].all_parts(), pairs, causal)
        if moved <= 0:
            return
        areas[heavy] -= moved
        areas[light] += moved


def _exchange(heavy: list[_Rest], light: list[_Rest], pairs: float, causal: bool) -> float:
    """Give tokens at the end of a document of one rank for as many at the beginning of one of another. Returns the
    pairs that are moved by it, at most about `pairs`."""
    taken = min(light, key=lambda part: part.first + part.last if causal else part.length)
    best, given, count = 0.0, heavy[0], 0
    for part in sorted(heavy, key=lambda part: part.last if causal else part.length):  # the first sends least
        tokens = min(part.tokens, taken.tokens)
        between = part.last - taken.first if causal else part.length - taken.length
        if between <= 0:
            continue
        if causal and between * between > 4 * pairs:  # tokens * between - tokens ** 2 == pairs
            tokens = min(tokens, int(between - math.sqrt(between * between - 4 * pairs)) // 2)
        elif not causal:
            tokens = min(tokens, int(pairs / between))
        moved = _pairs(part, causal, part.last - tokens, part.last)
        moved -= _pairs(taken, causal, taken.first, taken.first + tokens)
        if moved > best:
            best, given, count = moved, part, tokens
        if best >= 0.5 * pairs:
            break
    if best > 0:
        light.append(_Rest(given.start, given.length, given.last - count, given.last))
        heavy.append(_Rest(taken.start, taken.length, taken.first, taken.first + count))
        given.last -= count
        taken.first += count
        for parts, part in ((heavy, given), (light, taken)):
            if not part.tokens:
                parts.remove(part)
    return best


def _pairs(part: _Rest, causal: bool, first: int, last: int) -> float:
    """Pairs of the document's tokens [first, last)."""
    if causal:
        return (last * (last + 1) - first * (first + 1)) / 2
    return float(part.length * (last - first))
