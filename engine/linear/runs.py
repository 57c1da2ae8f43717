"""The documents of a rank's consecutive tokens: recurrences and convolutions start again at each. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

# Index tensors of each kind that stay on a device, so that layers share them. Packed rows bring new ones in every step,
# and each has 8 bytes for every token of the rank: kept for many steps they would take what no plan counts.
COPIES = 4


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Runs of consecutive tokens, each inside one document.

    Args:
        tokens: of all runs.
        starts: the first token of each run; the first run starts at 0.
        before: tokens of the first run's document before this shard.
    """

    tokens: int
    starts: tuple[int, ...] = (0,)
    before: int = 0

    @property
    def continues(self) -> bool:
        """The first run's document has tokens before this shard."""
        return self.before > 0

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where the runs start, and where the last one ends."""
        return (*self.starts, self.tokens)

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """[tokens]: of each token its run."""
        return np.repeat(np.arange(len(self.starts)), np.diff(self.bounds))

    def after(self, tokens: int) -> Runs:
        """These runs behind `tokens` tokens that precede the shard: those of the first run's document join that run,
        those before them are one run, of other documents."""
        first = max(0, tokens - self.before)
        starts = (*sorted({0, first}), *(start + tokens for start in self.starts[1:]))
        return Runs(tokens=tokens + self.tokens, starts=starts, before=max(0, self.before - tokens))


def runs_of(lengths: Sequence[int] | None, first: int, tokens: int) -> Runs:
    """Of the tokens `first` to `first + tokens` of a sequence whose documents have these lengths; None: it is one."""
    if lengths is None:
        return Runs(tokens=tokens, before=first)
    begins = np.cumsum((0, *lengths[:-1])) - first
    starts = begins[(begins > 0) & (begins < tokens)].tolist()
    return Runs(tokens=tokens, starts=(0, *starts), before=-int(begins[begins <= 0].max()))
