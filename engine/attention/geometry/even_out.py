"""Makes ranks with documents even: tokens of ranks with many visible pairs for tokens of ranks with few. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from typing import NamedTuple

from engine.attention.geometry.document_parts import PLAIN, DocumentPart, RankDocuments, Work, first_with, pair_counter

NEAR = 0.01  # of the mean, by which pairs of a rank may differ from it


def even_out(shards: list[RankDocuments], areas: list[float], work: Work) -> None:
    """Exchange tokens between the ranks with the most and the fewest pairs until all are near the mean. `areas` are the
    pairs of each rank as `pairs_between` counts them."""
    pairs_in = pair_counter(work)
    if work.irregular:
        areas = [sum(pairs_in(part, part.first, part.last) for part in shard.all_parts()) for shard in shards]
    exchange = _Exchange(work, pairs_in)
    mean = sum(areas) / len(areas)
    near = NEAR * mean
    for _ in range((32 if work.irregular else 4) * len(areas)):
        most, least = max(areas), min(areas)
        if max(most - mean, mean - least) <= near:
            return
        heavy, light = areas.index(most), areas.index(least)
        pairs = min(most - mean, mean - least) + 0.9 * near
        moved = exchange.move(shards[heavy].all_parts(), shards[light].all_parts(), pairs)
        if moved <= 0 and not exchange.halve(shards[heavy].parts):
            return
        areas[heavy] -= moved
        areas[light] += moved


class _Swap(NamedTuple):
    """Tokens at one end of `given`, a part of a rank with many pairs, for as many of `taken`, of one with few."""

    given: DocumentPart
    taken: DocumentPart
    given_last: bool = True  # the last tokens of the part, which have most pairs of their document without spans
    taken_last: bool = False


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Moves pairs from one rank to another by exchanging tokens."""

    work: Work
    pairs_in: Callable[[DocumentPart, int, int], float]

    def move(self, heavy: list[DocumentPart], light: list[DocumentPart], pairs: float) -> float:
        """Returns the pairs that are moved, at most about `pairs`."""
        find = self.by_formula if self.work == PLAIN else self.best
        best, found, count = find(heavy, light, pairs)
        if found is not None:
            for part, last, of, to in (
                (found.given, found.given_last, heavy, light),
                (found.taken, found.taken_last, light, heavy),
            ):
                to.append(DocumentPart(part.start, part.length, *_at_end(part, count, last)))
                part.first, part.last = (part.first, part.last - count) if last else (part.first + count, part.last)
                if not part.tokens:
                    of.remove(part)
        return best

    def best(
        self, heavy: list[DocumentPart], light: list[DocumentPart], pairs: float
    ) -> tuple[float, _Swap | None, int]:
        """The pairs that a swap moves, the swap, and how many tokens it exchanges."""
        best, found, count = 0.0, None, 0
        for swap in self.of_any_ends(heavy, light) if self.work.irregular else self.of_last_tokens(heavy, light):
            tokens = self.tokens(swap, pairs)
            moved = self.moved(swap, tokens) if tokens > 0 else 0.0
            if moved > best:
                best, found, count = moved, swap, tokens
            if best >= 0.5 * pairs:
                break
        return best, found, count

    def by_formula(
        self, heavy: list[DocumentPart], light: list[DocumentPart], pairs: float
    ) -> tuple[float, _Swap | None, int]:
        """The same without windows and spans, of causal documents: tokens * (between - tokens) pairs are moved."""
        best, found, count = 0.0, None, 0
        taken = min(light, key=lambda part: part.first + part.last)
        first, room = taken.first, taken.last - taken.first
        for part in sorted(heavy, key=lambda part: part.last):  # the first sends least
            between = part.last - first
            tokens = min(part.last - part.first, room, between // 2)
            if tokens <= 0:
                continue
            if between * between > 4 * pairs:
                tokens = min(tokens, int(between - math.sqrt(between * between - 4 * pairs)) // 2)
            moved = tokens * (between - tokens)
            if moved > best:
                best, found, count = moved, _Swap(part, taken), tokens
            if best >= 0.5 * pairs:
                break
        return best, found, count

    def of_last_tokens(self, heavy: list[DocumentPart], light: list[DocumentPart]) -> Iterator[_Swap]:
        causal = self.work.causal
        taken = min(light, key=self.density)
        for part in sorted(heavy, key=lambda part: part.last if causal else part.length):  # the first sends least
            yield _Swap(part, taken)

    def of_any_ends(self, heavy: list[DocumentPart], light: list[DocumentPart]) -> Iterator[_Swap]:
        for given, taken in itertools.product(nlargest(4, heavy, self.density), nsmallest(4, light, self.density)):
            for ends in itertools.product((True, False), (False, True)):
                yield _Swap(given, taken, *ends)

    def density(self, part: DocumentPart) -> float:
        return self.pairs_in(part, part.first, part.last) / part.tokens

    def halve(self, parts: list[DocumentPart]) -> bool:
        """Cut the part with most pairs in two, where tokens in its middle may be heavier than those at its ends."""
        part = max(parts, key=lambda part: self.pairs_in(part, part.first, part.last))
        if not self.work.irregular or part.tokens < 2:
            return False
        middle = (part.first + part.last) // 2
        parts.append(DocumentPart(part.start, part.length, middle, part.last))
        part.last = middle
        return True

    def moved(self, swap: _Swap, count: int) -> float:
        """Pairs that exchanging so many tokens moves."""
        return self.pairs_in(swap.given, *_at_end(swap.given, count, swap.given_last)) - self.pairs_in(
            swap.taken, *_at_end(swap.taken, count, swap.taken_last)
        )

    def tokens(self, swap: _Swap, pairs: float) -> int:
        """How many to exchange."""
        part, taken = swap.given, swap.taken
        tokens = min(part.tokens, taken.tokens)
        if self.work.irregular:  # moving more may move fewer pairs
            while tokens and self.moved(swap, tokens) > pairs:
                tokens //= 2
            more = min(2 * tokens, part.tokens, taken.tokens)
            return tokens + first_with(more - tokens, lambda count: self.moved(swap, tokens + count) >= pairs)
        if not self.work.causal:
            between = part.length - taken.length
            return min(tokens, int(pairs / between)) if between > 0 else 0
        # Of more tokens the last ones have fewer pairs than those they are exchanged for.
        tokens = max(0, min(tokens, (part.last - taken.first) // 2))
        return first_with(tokens, lambda count: self.moved(swap, count) >= pairs)


def _at_end(part: DocumentPart, count: int, last: bool) -> tuple[int, int]:
    """The last tokens of a part, so many, or its first ones."""
    return (part.last - count, part.last) if last else (part.first, part.first + count)
