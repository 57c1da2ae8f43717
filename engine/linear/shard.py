"""A rank's part of a linear layer: consecutive tokens with their documents, and the ranks that hold the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from engine.attention.context import ContextParallel
from engine.attention.masks import Documents
from engine.linear.convolution import convolved
from engine.linear.gated_delta import gated_delta
from engine.linear.kernels import convolution_for, delta_rule_for, state_space_for
from engine.linear.mamba2 import state_space
from engine.linear.order import from_consecutive, to_consecutive
from engine.linear.runs import Runs, runs_of
from engine.linear.scan import StateScan


class LinearShard:
    """What a mixer needs to know besides its tokens."""

    def __init__(self, runs: Runs, cp: ContextParallel | None = None) -> None:
        """`cp`: the ranks that hold the others; None or a group of one: this rank has the whole sequence."""
        self.runs = runs
        self._cp = cp if cp is not None and cp.size > 1 else None
        self.scan = None if self._cp is None else StateScan(self._cp)

    def convolved(self, x_BLC: Tensor, weight_CT: Tensor, bias_C: Tensor | None = None) -> Tensor:
        """`engine.linear.convolution.convolved` of this shard."""
        return convolved(x_BLC, weight_CT, bias_C, self.runs, self._cp, convolution_for(x_BLC))

    def recurrence(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None) -> Tensor:
        """Of this shard: the gated delta rule where beta is given, else the recurrence of Mamba-2."""
        if beta is None:
            return state_space(q, k, v, decay, self.runs, self.scan, state_space_for(v))
        return gated_delta(q, k, v, decay, beta, self.runs, self.scan, delta_rule_for(v))


Recurrence: TypeAlias = Callable[..., Tensor]  # q, k, v, decay and, for the delta rule, beta of a shard's tokens -> out
Mixer: TypeAlias = Callable[[Tensor, LinearShard], Tensor]  # x_BLE of a shard's tokens -> the residual branch


class Mix:
    """How a model's linear layers run on these ranks: what `attend` is to layers of attention.

    Args:
        cp: the ranks that share a sequence, and their layout; None: this rank has the whole of it.
        documents: packed ones; None: a sequence is one text.
    """

    def __init__(self, cp: ContextParallel | None = None, documents: Documents | None = None) -> None:
        self._cp, self._documents = cp, documents

    def enter(self, x_BLE: Tensor) -> Tensor:
        """This rank's consecutive tokens, from those in the layout's order. Collective, and so is its backward."""
        return x_BLE if self._cp is None else to_consecutive(x_BLE, self._cp)

    def leave(self, x_BLE: Tensor) -> Tensor:
        """The reverse."""
        return x_BLE if self._cp is None else from_consecutive(x_BLE, self._cp)

    def __call__(self, mixer: Mixer, x_BLE: Tensor) -> Tensor:
        """The branch of `mixer` of consecutive tokens. Collective, and so is its backward."""
        return mixer(x_BLE, self._shard(x_BLE.shape[1], self._cp))

    def _shard(self, tokens: int, cp: ContextParallel | None) -> LinearShard:
        rank, size = (0, 1) if cp is None else (cp.rank, cp.size)
        lengths = None if self._documents is None else self._documents.lengths_in(tokens * size)
        return LinearShard(runs_of(lengths, rank * tokens, tokens), cp)
