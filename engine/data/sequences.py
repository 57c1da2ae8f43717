"""The sequences of a training step, or its rows of packed documents: the same for every method, CP size and number of
ranks.

A run of `burst train` divides a store into training text, whose sequences it takes in shuffled order, and validation
text. The shuffled order needs no memory. A Feistel network permutes the numbers below a power of four; applying it
until the result is below `size` makes it a permutation of those (cycle walking, Black and Rogaway, CT-RSA 2002). Unlike
a random generator's shuffle it is the same for every version of every library.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.attention.masks import Documents
from engine.data.packing import pack, padding_lengths, positions_of
from engine.lm_head.loss_kernel import IGNORE

if TYPE_CHECKING:
    from torch import Tensor

    from engine.data.packing import Integers
    from engine.data.store import StoreHeader, TokenStore
    from engine.settings import TrialSettings


class TrainingData(ABC):
    """Tokens to train on."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Every token id is below it."""

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Origin of the tokens, as plain values."""


class Sequences(TrainingData):
    """Training sequences by number. A sequence overlaps the next by one token: the last one's label."""

    @abstractmethod
    def sequence(self, number: int, seq_len: int) -> Tensor:
        """`seq_len` tokens and the one after them, int64 [seq_len + 1]. `number` has no upper limit."""

    def batch(self, step: int, replica: int, dp_size: int, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """(tokens_BS, labels_BS) of one step and data-parallel replica: whole sequences, labels one token ahead.

        Sequences are assigned in order of (step, replica, place in the batch), independent of method and CP size.
        """
        import torch

        first = (step * dp_size + replica) * batch_size
        tokens = torch.stack([self.sequence(first + place, seq_len) for place in range(batch_size)])
        return tokens[:, :-1], tokens[:, 1:]


# Default fraction of a text held out, by `burst train data` and by `burst train` from a plain text.
VALIDATION = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpan:
    """Tokens `start` to `stop` (exclusive) of a store."""

    start: int
    stop: int

    def sequences(self, seq_len: int) -> int:
        """Whole sequences in it, each with the token after its last one."""
        return max(0, self.stop - self.start - 1) // seq_len


def spans(header: StoreHeader, *, built: bool) -> tuple[TokenSpan, TokenSpan]:
    """(training, validation) of the tokens of a store. One that `burst train data` built has the split chosen
    there, which may hold out nothing; of a text read without a store of its own the last 1% is held out."""
    edge = header.count - (header.validation if built else int(header.count * VALIDATION))
    return TokenSpan(start=0, stop=edge), TokenSpan(start=edge, stop=header.count)


class ShuffledSequences(Sequences):
    """A span's sequences, each once per epoch, every epoch in an order of its own.

    The order is a function of seed and sequence number alone, so a resumed run needs no state of it.
    """

    def __init__(self, store: TokenStore, span: TokenSpan, seed: int) -> None:
        self._store, self._span, self._seed = store, span, seed

    def sequence(self, number: int, seq_len: int) -> Tensor:
        epoch, place = divmod(number, self._span.sequences(seq_len))
        place = permuted(place, self._span.sequences(seq_len), f"{self._seed}:{epoch}")
        return self._store.window(self._span.start + place * seq_len, seq_len + 1)

    @property
    def vocabulary(self) -> int:
        return self._store.vocabulary

    def describe(self) -> dict[str, object]:
        return self._store.describe()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Documents one after another, with their boundaries."""

    tokens_S: Tensor
    labels_S: Tensor  # the next token of the same document; -100 at its last one, and where none is to be learnt
    lengths: Integers  # of the documents, which fill the row

    @property
    def positions_S(self) -> Tensor:
        """Of the tokens in their documents, int64."""
        import torch

        return torch.from_numpy(positions_of(self.lengths))

    @property
    def documents(self) -> Documents:
        """The mask of the row."""
        return Documents(tuple(self.lengths.tolist()))


def joined(rows: Iterable[PackedRow], tokens: int) -> PackedRow:
    """Rows one after another, padded at their end to `tokens`. Padding is documents of its own without a label."""
    import torch

    rows = list(rows)
    lengths = joined_lengths([row.lengths for row in rows], tokens)
    padding = torch.zeros(tokens - sum(len(row.tokens_S) for row in rows), dtype=torch.int64)
    return PackedRow(
        tokens_S=torch.cat([*(row.tokens_S for row in rows), padding]),
        labels_S=torch.cat([*(row.labels_S for row in rows), padding + IGNORE]),
        lengths=lengths,
    )


def joined_lengths(rows: Sequence[Integers], tokens: int) -> Integers:
    """Lengths of the documents of rows one after another, those of the padding at their end included."""
    free = tokens - sum(int(lengths.sum()) for lengths in rows)
    assert free >= 0, (tokens, free)
    return np.concatenate([*rows, np.array(padding_lengths(free), np.int64)])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCounts:
    """What some packed rows hold, without their padding."""

    tokens: int
    pairs: float  # (query, key) pairs that attention inside the documents shows, on average over the model's layers
    padding: float  # the part of the rows that is padding


class PackedSequences(TrainingData):
    """A span's documents, packed into rows; each row once per epoch, every epoch in an order of its own.

    A document that the span cuts is a shorter one. Rows and order are functions of the settings alone.
    """

    def __init__(self, store: TokenStore, span: TokenSpan, settings: TrialSettings) -> None:
        """Raises ValueError when there are no documents to pack."""
        self._store, self._seed, self._settings = store, settings.seed, settings
        starts = store.document_starts
        stops = np.append(starts[1:], store.header.count)
        starts, stops = np.maximum(starts, span.start), np.minimum(stops, span.stop)
        inside = starts < stops
        self.packing = pack(
            starts[inside],
            (stops - starts)[inside],
            settings.seq_len,
            rule=settings.packing,
            longer=settings.longer_documents,
            seed=settings.seed,
        )
        if not len(self.packing):
            raise ValueError(
                f"no document of {settings.data} can be packed: of {int(inside.sum())}, "
                f"{self.packing.dropped_documents} are longer than seq_len {settings.seq_len}, and the others have one "
                "token, which has no label; give other documents, a longer seq_len or longer_documents: split"
            )

        windowed, window = settings.model.windowed, settings.model.window
        share = sum(windowed) / len(windowed)
        self._pairs = (1 - share) * self.packing.pairs() + share * self.packing.pairs(window)

    def place(self, number: int) -> int:
        """The row of `packing` that is number `number` of the training, which has no upper limit."""
        epoch, place = divmod(number, len(self.packing))
        return permuted(place, len(self.packing), f"{self._seed}:{epoch}")

    def row(self, place: int) -> PackedRow:
        """A row of `packing`, without padding."""
        import torch

        starts, lengths, ends = self.packing.row(place)
        places = np.repeat(starts, lengths) + positions_of(lengths)
        following = np.minimum(places + 1, self._store.header.count - 1)
        labels = self._store.at(following).astype(np.int64)
        labels[~self._store.learnt(following)] = IGNORE
        labels[(np.cumsum(lengths) - 1)[ends]] = IGNORE
        return PackedRow(
            tokens_S=torch.from_numpy(self._store.at(places).astype(np.int64)),
            labels_S=torch.from_numpy(labels),
            lengths=lengths,
        )

    def of_micro_batch(self, number: int) -> range:
        """The rows of a micro-batch, counted over all steps and replicas."""
        size = self._settings.batch_size
        return range(number * size, (number + 1) * size)

    def documents(self, micro_batch: int) -> Documents:
        """Those of a micro-batch, as a mask."""
        rows = [self.packing.row(self.place(number))[1] for number in self.of_micro_batch(micro_batch)]
        return Documents(tuple(joined_lengths(rows, self._settings.row_tokens).tolist()))

    def of_steps(self, first: int, steps: int) -> PackedCounts:
        """What the rows of `steps` steps from `first` on hold, over all ranks."""
        rows = self._settings.batch_size * self._settings.gradient_accumulation * self._settings.dp_size
        return self.counts(range(first * rows, (first + steps) * rows))

    def counts(self, numbers: range) -> PackedCounts:
        """Of the rows with these numbers of the training."""
        places = [self.place(number) for number in numbers]
        tokens, pairs = int(self.packing.tokens[places].sum()), float(self._pairs[places].sum())
        return PackedCounts(tokens=tokens, pairs=pairs, padding=1 - tokens / (len(numbers) * self.packing.seq_len))

    @property
    def vocabulary(self) -> int:
        return self._store.vocabulary

    def describe(self) -> dict[str, object]:
        return self._store.describe()


def training_sequences(store: TokenStore, span: TokenSpan, settings: TrialSettings) -> TrainingData:
    """The sequences of a span as a training run takes them. Raises ValueError for data that do not fit the mask."""
    if settings.packs:
        return PackedSequences(store, span, settings)
    if store.header.answers_only:
        raise ValueError(
            f"{settings.data} holds chats, of which answers alone are learnt, and mask {settings.mask} learns all "
            "tokens; set mask to documents"
        )
    return ShuffledSequences(store, span, settings.seed)


_ROUNDS = 4


def permuted(number: int, size: int, key: str) -> int:
    """Place of `number` in the order of `key`; a permutation of 0 .. size - 1."""
    assert 0 <= number < size, (number, size)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        number = _feistel(number, half_bits, key)
        if number < size:
            return number


def _feistel(number: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = number >> half_bits, number & mask
    for index in range(_ROUNDS):
        digest = hashlib.blake2b(f"{key}:{index}:{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ int.from_bytes(digest, "big") & mask
    return left << half_bits | right
