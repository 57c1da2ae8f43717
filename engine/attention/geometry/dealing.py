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

**Windows and spans.** Tokens of a document that are further from its beginning than a window have equally many pairs.
Spans add pairs that no length shows, and a window hides pairs of documents that are not causal: ranks are filled
without either. In the end tokens are exchanged, with all pairs counted (`engine.attention.geometry.even_out`).

Heavy work is paired with light work as in zigzag (Llama 3, arXiv:2407.21783); documents are whole where they fit and
cut where they do not, as in block placement (FCP, arXiv:2605.08524).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.attention.geometry.document_parts import (
    PLAIN,
    DocumentPart,
    RankDocuments,
    Work,
    first_with,
    pairs_between,
    pairs_of_whole,
)
from engine.attention.geometry.even_out import even_out
from engine.attention.geometry.shards import ShardSegments
from engine.attention.geometry.tiles import NO_LIMIT, Integers

SLACK = 0.004  # of a rank's pairs, which may be missed where a document is then cut in one place instead of two


@dataclass(slots=True)
class _Dealer:
    """The documents that are left, and the rank that is being filled."""

    causal: bool
    window: int  # of `Work`; whole numbers are compared in less time than with infinity
    lengths: list[int]  # of whole documents, ascending
    starts: list[int]  # of the same documents
    cut: list[DocumentPart] = field(default_factory=list)  # documents of which some rank has a part
    size: int = 0  # tokens of a rank
    tokens: int = 0  # that the rank still takes
    pairs: float = 0.0
    light: float = 0.0  # pairs of a token, over the documents with the fewest that could fill the rank
    slack: float = 0.0
    shard: RankDocuments = field(default_factory=RankDocuments)

    def whole(self, at: int) -> DocumentPart:
        return DocumentPart(self.starts[at], self.lengths[at], 0, self.lengths[at])

    def remove(self, at: int) -> None:
        del self.lengths[at], self.starts[at]

    @property
    def excess(self) -> float:
        """Pairs that the rank needs beyond those of the lightest tokens that could fill it."""
        return self.pairs - self.tokens * self.light

    def seen(self, rest: DocumentPart, first: int, last: int) -> float:
        """Pairs of tokens [first, last) of a document."""
        return pairs_between(rest.length, first, last, self.causal, self.window)

    def take(self, rest: DocumentPart, first: int, last: int, pairs: float) -> None:
        """Give the rank tokens [first, last) of a document, which have so many pairs."""
        self.shard.parts.append(DocumentPart(rest.start, rest.length, first, last))
        self.tokens -= last - first
        self.pairs -= pairs

    def fill(self, tokens: int, pairs: float) -> RankDocuments:
        """One rank: so many tokens, and about so many pairs."""
        self.size, self.tokens, self.pairs, self.slack, self.shard = (
            tokens,
            tokens,
            pairs,
            SLACK * pairs,
            RankDocuments(),
        )
        if self.causal and self.window == NO_LIMIT:
            rests = [((rest.first + rest.last + 1) / 2, rest.last - rest.first, rest) for rest in self.cut]
        else:
            rests = [(self.density(rest), rest.last - rest.first, rest) for rest in self.cut]
        self.light = self.lightest(tokens, rests)
        self.take_rests(rests)
        self.take_whole_documents()
        while self.tokens:
            self.close()
        return self.shard

    def lightest(self, tokens: int, cut: list[tuple[float, int, DocumentPart]]) -> float:
        """Pairs per token of the documents with the fewest, enough of them to fill a rank of so many tokens."""
        rests = sorted([each[:2] for each in cut], reverse=True)
        # A whole document that is no longer than the window has length * (length + more) / each pairs.
        more, each, window = (1, 2, self.window) if self.causal else (0, 1, NO_LIMIT)
        left, pairs, seen, shorter = tokens, 0.0, 0, self.as_dense(rests[-1][0]) if rests else NO_LIMIT
        for length in self.lengths:
            while shorter <= length and left:
                lower, count = rests.pop()
                count = min(count, left)
                pairs, left, shorter = pairs + lower * count, left - count, NO_LIMIT
                if rests:
                    shorter = self.as_dense(rests[-1][0])
            if length <= window:
                if length >= left:
                    return (pairs + (seen + (length + more) * left) / each) / tokens
                seen += (length + more) * length
            else:
                whole = pairs_between(length, 0, length, True, window)
                if length >= left:
                    return (pairs + seen / each + whole * left / length) / tokens
                pairs += whole
            left -= length
        pairs += seen / each
        while rests and left:
            lower, count = rests.pop()
            count = min(count, left)
            pairs, left = pairs + lower * count, left - count
        return pairs / tokens

    def as_dense(self, density: float) -> int:
        """The length of a whole document that has so many pairs for each token."""
        if not self.causal:
            return math.ceil(density)
        if (length := 2 * density - 1) <= (window := self.window):
            return math.ceil(length)
        return math.ceil(window * (window - 1) / (2 * (window - density))) if density < window else NO_LIMIT

    def density(self, rest: DocumentPart) -> float:
        if not self.causal:
            return float(rest.length)
        if rest.last <= self.window:
            return (rest.first + rest.last + 1) / 2
        return self.seen(rest, rest.first, rest.last) / (rest.last - rest.first)

    def take_rests(self, cut: list[tuple[float, int, DocumentPart]]) -> None:
        """Take what is left of cut documents where it fits, and a part of a heavy one that does not."""
        taken, heavy, heaviest, room = [], None, 0.0, self.excess + self.slack
        for density, count, rest in cut:
            excess = count * (density - self.light)
            if count <= self.tokens and excess <= room:
                taken.append(rest)
                room -= excess
                self.take(rest, rest.first, rest.last, count * density)
            elif density > heaviest:
                heavy, heaviest = rest, density
        for rest in taken:
            self.cut.remove(rest)
        mean = self.pairs / self.tokens if self.tokens else math.inf
        if heaviest <= mean and self.lengths and not self.shard.parts:
            longest = self.whole(-1)
            density = self.density(longest)
            if density > mean and longest.length * (density - self.light) > self.excess + self.slack:
                self.remove(-1)
                self.cut.append(longest)
                heavy, heaviest = longest, density
        if heavy is not None and heaviest > mean and self.excess > self.slack:
            self.take_heavy(heavy)

    def take_heavy(self, rest: DocumentPart) -> None:
        """Take the tokens at the end of a document that have the rank's excess; more tokens, of which some are at its
        beginning, where otherwise too many light ones would be left for the ranks that the rest can fill."""
        excess, tokens = self.excess, rest.last - rest.first
        count = self.from_end(rest, excess)
        # Ranks that have room for the rest by its pairs.
        ranks = (self.seen(rest, rest.first, rest.last) - tokens * self.light - excess) / excess
        count = max(count, math.ceil(tokens - max(0.0, ranks) * self.size))
        self.take_ends(rest, min(count, self.tokens, tokens), excess)

    def take_ends(self, rest: DocumentPart, count: int, excess: float) -> None:
        """Take `count` tokens of a document from its end and its beginning that have so much excess."""
        first, last, tokens, wanted = rest.first, rest.last, rest.last - rest.first, excess + count * self.light
        if self.causal and last <= self.window:
            least, most = count * (2 * first + count + 1) / 2, count * (2 * last - count + 1) / 2
        else:
            least, most = self.seen(rest, first, first + count), self.seen(rest, last - count, last)
        begin = 0
        if 2 * count <= tokens and abs(least - wanted) <= self.slack:
            begin = count  # the rank with the others receives fewer keys
        elif most - wanted > self.slack and most > least:
            if wanted <= least + self.slack:
                begin = count
            elif last <= self.window:  # a token that moves to the beginning has so many pairs less
                begin = min(count, round((most - wanted) / (tokens - count)))
            else:
                begin = first_with(
                    count,
                    lambda at: self.seen(rest, first, first + at) + self.seen(rest, last - count + at, last) <= wanted,
                )
        end = count - begin
        if begin:
            self.take(rest, first, first + begin, self.seen(rest, first, first + begin) if end else least)
        if end:
            self.take(rest, last - end, last, self.seen(rest, last - end, last) if begin else most)
        rest.first, rest.last = first + begin, last - end
        if rest.first == rest.last:
            self.cut.remove(rest)

    def from_end(self, rest: DocumentPart, excess: float) -> int:
        """Tokens at the end of a document that have so much excess; all of them where they have less."""
        tokens = rest.last - rest.first
        # Those that see equally many keys come last.
        flat = max(0, rest.last - self.window) if self.causal else tokens
        if flat:
            more = (self.window if self.causal else rest.length) - self.light
            if flat * more >= excess:
                return min(tokens, round(excess / more)) if more > 0 else tokens
            if not self.causal:
                return tokens
            excess -= flat * more
        top = rest.last - flat + 0.5 - self.light
        inside = top * top - 2 * excess
        return min(tokens, round(flat + top - math.sqrt(inside))) if top > 0 and inside > 0 else tokens

    def take_whole_documents(self) -> None:
        """Take the longest document that leaves the rank no lighter tokens to find than there are, and so on. Where
        only light ones fit and the rank lacks pairs, take a part of the shortest that does not fit."""
        lengths, starts, causal, light = self.lengths, self.starts, self.causal, self.light
        take_start, take_length = self.shard.starts.append, self.shard.lengths.append
        next_start, next_length, root, search = starts.pop, lengths.pop, math.sqrt, bisect_right
        half, times = (light - 0.5, 2) if causal else (light / 2, 1)
        # A whole document has an excess of length * (shift + each * length).
        square, shift, each = half * half, -2 * half / times, 1 / times
        tokens, excess, lacks, window = self.tokens, self.excess + self.slack, 3 * self.slack, self.window
        while tokens and lengths:
            # The longest document that has no more than the excess: where its quadratic reaches it.
            inside = square + times * excess
            fits = half + root(inside) if inside > 0 else half
            if fits > window:
                fits = (excess + window * (window - 1) / 2) / (window - light) if window > light else NO_LIMIT
            at = search(lengths, int(fits) if fits < tokens else tokens) - 1  # by whole numbers, which takes less time
            if excess > lacks and (
                at < 0
                or (lengths[at] < times * (excess / tokens + light) <= window)
                or (window < NO_LIMIT and lengths[at] < self.as_dense(excess / tokens + light))
            ):
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
            length = next_length(at)
            take_length(length)
            take_start(next_start(at))
            tokens -= length
            if length <= window:
                excess -= length * (shift + each * length)
            else:
                excess -= pairs_between(length, 0, length, True, window) - length * light
        self.pairs = excess - self.slack + tokens * light
        self.tokens = tokens

    def close(self) -> None:
        """Fill the rank from one document, which has the pairs that are missing; or take one that is too short."""
        found, at, least = None, None, math.inf
        for rest in self.cut:
            missed = self.missed(rest.length, rest.first, rest.last)
            if missed < least or (missed == least and found is not None and rest.last < found.last):
                found, least = rest, missed
        if self.lengths and least > self.slack:
            for each in self.places():
                missed = self.missed(self.lengths[each], 0, self.lengths[each])
                if missed < least:
                    at, least = each, missed
        if at is not None:
            found = self.whole(at)
            self.remove(at)
            self.cut.append(found)
        assert found is not None, "documents have as many tokens as the ranks"
        self.take_ends(found, min(found.last - found.first, self.tokens), self.excess)

    def places(self) -> tuple[int, ...]:
        """Whole documents that may fill the rank: the shortest that is long enough, and the two around the shortest
        that has the missing pairs at its end; of one that no rank could take the rest of, around the mean."""
        mean = self.pairs / self.tokens
        wanted = max(self.tokens, mean + self.tokens / 2 if self.causal else mean)
        if wanted > self.size and self.causal:
            wanted = max(wanted, 2 * mean)
        wanted, last = min(wanted, self.window + self.tokens), len(self.lengths) - 1
        place = min(bisect_left(self.lengths, math.ceil(wanted)), last)
        return min(bisect_left(self.lengths, self.tokens), last), max(0, place - 1), place

    def missed(self, length: int, first: int, last: int) -> float:
        """Pairs by which the rank misses its target when tokens [first, last) of a document fill it, at least `slack`;
        more where they are too few."""
        count, left = last - first, 0.0
        if count >= self.tokens:
            count, spare = self.tokens, count - self.tokens
        else:
            left, spare = (self.tokens - count) * self.light, 0
        if not self.causal:
            fewest = most = float(length * count)
        elif last <= self.window:
            fewest, most = count * (2 * first + count + 1) / 2, count * (2 * (first + spare) + count + 1) / 2
        else:
            fewest = pairs_between(length, first, first + count, True, self.window)
            most = pairs_between(length, first + spare, last, True, self.window)
        wanted = self.pairs - left
        if wanted < fewest:
            left += fewest - wanted
        elif wanted > most:
            left += wanted - most
        return left if left > self.slack else self.slack


def deal(lengths: Sequence[int], ranks: int, work: Work = PLAIN, *, cut: int = 0) -> ShardSegments:
    """The positions of each rank: the same on every rank.

    Args:
        lengths: tokens of the documents, in the order of the sequence.
        work: what their tokens see.
        cut: the tokens before this position are dealt by themselves, and so are the others.
    """
    start: list[int] = []
    count: list[int] = []
    runs: list[int] = []  # of a rank
    sizes = np.array(lengths, dtype=np.int64)
    for begin, end in ((0, cut), (cut, int(sizes.sum()))):
        for shard in _dealt_between(sizes, ranks, work, begin, end) if begin < end else ():
            start += shard.starts
            start += [part.start + part.first for part in shard.parts]
            count += shard.lengths
            count += [part.last - part.first for part in shard.parts]
            runs.append(len(shard.starts) + len(shard.parts))
    rank = np.repeat(np.arange(len(runs)) % ranks, runs)
    return ShardSegments.of_runs(ranks, rank, np.array(start), np.array(count))


def _dealt_between(lengths: Integers, ranks: int, work: Work, begin: int, end: int) -> list[RankDocuments]:
    """What each rank is given of the tokens at positions [begin, end)."""
    assert (end - begin) % ranks == 0, "the layout splits only lengths that divide"
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    # Documents that begin or end outside are cut already.
    first, last = int(np.searchsorted(bounds, begin, side="right")) - 1, int(np.searchsorted(bounds, end))
    low, high = first + int(bounds[first] < begin), last - int(bounds[last] > end)
    cut = []
    for at in sorted({*range(first, low), *range(high, last)}):
        start, length = int(bounds[at]), int(lengths[at])
        cut.append(DocumentPart(start, length, max(0, begin - start), min(length, end - start)))
    order = np.argsort(lengths[low:high], kind="stable")
    whole = lengths[low:high][order]
    dealer = _Dealer(work.causal, work.window, whole.tolist(), bounds[low:][order].tolist(), cut)
    left = float(pairs_of_whole(whole, work).sum()) + sum(dealer.seen(rest, rest.first, rest.last) for rest in cut)
    dealt, areas, size = [], [], (end - begin) // ranks
    for rank in range(ranks):
        pairs = left / (ranks - rank)
        dealt.append(dealer.fill(size, pairs))
        areas.append(pairs - dealer.pairs)
        left -= areas[-1]
    even_out(dealt, areas, work)
    # The keys that a rank lacks of a long document are then those of the ranks before it, whose chunks come first.
    return dealt[::-1]
