"""Attention's result kept for backward, whole or of the sequence's tail alone.

Sequence-level selective checkpointing (BurstEngine, arXiv:2509.19836): with causal attention a query's work grows with
its position, so keeping the tail's outputs saves the most recomputation for the memory they take.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import tail_cut


@dataclass(frozen=True, slots=True)
class SavedOutput:
    """What one call of attention gave, for this rank's tokens at or after global position `cut`.

    Handed to a later call with the same inputs, that call attends for the tokens before `cut` only.
    """

    out_BLND: Tensor  # rows from `cut` on, the last of the local tokens
    lse_BNL: Tensor
    cut: int = 0  # global position

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.out_BLND, self.lse_BNL

    def holding(self, tensors: tuple[Tensor, ...]) -> SavedOutput:
        """The same rows with their tensors elsewhere, on another device say."""
        return replace(self, out_BLND=tensors[0], lse_BNL=tensors[1])


def save_suffix(out_BLND: Tensor, lse_BNL: Tensor, cp: ContextParallel, tail: float) -> SavedOutput | None:
    """What to keep of a call's result so that attention is computed again for the first 1 - `tail` of the sequence.

    `tail` 1 keeps the tensors themselves; a smaller tail a copy of its rows, since a view would keep everything; None
    when nothing is kept. Free of any graph. Raises ValueError when `tail` is no fraction.
    """
    seq_len = out_BLND.shape[1] * cp.size
    cut = tail_cut(tail, seq_len, cp.size)
    if cut == seq_len:
        return None
    out_BLND, lse_BNL = out_BLND.detach(), lse_BNL.detach()
    if cut == 0:
        return SavedOutput(out_BLND, lse_BNL)
    head = cp.rows_before(cut, seq_len)
    return SavedOutput(out_BLND[:, head:].clone(), lse_BNL[:, :, head:].clone(), cut)
