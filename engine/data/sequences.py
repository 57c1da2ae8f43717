"""The sequences of a training step: the same for every method, CP size and number of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Sequences(ABC):
    """Training sequences by number. A sequence overlaps the next by one token: the last one's label."""

    @abstractmethod
    def sequence(self, number: int, seq_len: int) -> Tensor:
        """`seq_len` tokens and the one after them, int64 [seq_len + 1]. `number` has no upper limit."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Every token id is below it."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Origin of the tokens, as plain values."""

    def batch(self, step: int, replica: int, dp_size: int, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """(tokens_BS, labels_BS) of one step and data-parallel replica: whole sequences, labels one token ahead.

        Sequences are assigned in order of (step, replica, place in the batch), independent of method and CP size.
        """
        import torch

        first = (step * dp_size + replica) * batch_size
        tokens = torch.stack([self.sequence(first + place, seq_len) for place in range(batch_size)])
        return tokens[:, :-1], tokens[:, 1:]
