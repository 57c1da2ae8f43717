"""What the check problem of a training trial learns from: sequences or packed documents of random tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from engine.data.sequences import PackedSequences, Sequences, TokenSpan, TrainingData
from engine.data.store import SCHEMA, StoreHeader, TokenStore
from engine.settings import TrialSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from engine.data.packing import Integers


class RandomTokens(Sequences):
    """Sequences of random tokens, each from a generator of its own."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._vocabulary, self._seed = vocabulary, seed

    def sequence(self, number: int, seq_len: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        return torch.randint(self._vocabulary, (seq_len + 1,), generator=generator)

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    def describe(self) -> dict[str, object]:
        return {"origin": "random tokens"}


class RandomDocuments:
    """Documents of random tokens and lengths, as `PackedSequences` reads a store: enough for a step of `settings`."""

    def __init__(self, settings: TrialSettings) -> None:
        chance = np.random.default_rng(settings.seed)
        rows = settings.batch_size * settings.gradient_accumulation * settings.dp_size
        lengths = chance.integers(2, max(3, settings.seq_len // 2), 8 * rows + 8)
        self.document_starts = np.cumsum(lengths) - lengths
        self.vocabulary = settings.model.vocab
        self._tokens = chance.integers(0, self.vocabulary, int(lengths.sum()))
        self.header = StoreHeader(
            origin="random tokens", python="", sha256="", tokenizer="", count=len(self._tokens), schema=SCHEMA
        )

    def at(self, places: Integers) -> Integers:
        return self._tokens[places]

    def learnt(self, places: Integers) -> NDArray[np.bool_]:
        return np.ones(len(places), dtype=bool)


def check_data(problem: TrialSettings) -> TrainingData:
    """The random tokens that a check problem learns from."""
    if not problem.packs:
        return RandomTokens(problem.model.vocab, problem.seed)
    store = RandomDocuments(problem)
    span = TokenSpan(start=0, stop=store.header.count)
    return PackedSequences(cast(TokenStore, store), span, problem)
