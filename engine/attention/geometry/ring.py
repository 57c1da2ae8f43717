"""The order in which ranks receive chunks. Pure integer code.

Flat ring: chunks move one rank on at every step. Double ring (BurstAttention, arXiv:2403.09347, section 3.3;
LoongTrain, arXiv:2406.18485): in outer step c and inner step t, local rank i of node n holds the chunk of node n - c,
local rank i - t; a transfer between nodes starts with its outer step and may last as long as the inner steps of it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Order in which every rank processes every chunk. node_size == cp_size is the flat ring."""

    cp_size: int
    node_size: int  # CP ranks per node; divides cp_size

    def __post_init__(self) -> None:
        if self.node_size < 1 or self.cp_size % self.node_size:
            raise ValueError(
                f"node_size {self.node_size} does not divide cp_size {self.cp_size}; give ranks per node that do"
            )

    @property
    def nodes(self) -> int:
        return self.cp_size // self.node_size

    def owner(self, cp_rank: int, step: int) -> int:
        """CP rank whose chunk `cp_rank` processes at `step`, 0 <= step < cp_size."""
        node, local_rank = divmod(cp_rank, self.node_size)
        outer_step, inner_step = divmod(step, self.node_size)
        return (node - outer_step) % self.nodes * self.node_size + (local_rank - inner_step) % self.node_size


@dataclass(frozen=True, slots=True)
class RingTraffic:
    """Steps and bytes of a ring that a mask leaves, as fractions: 1 where every rank needs all of every chunk."""

    steps: float = 1.0  # with work, over all steps
    near: float = 1.0  # tokens a rank receives from ranks of its node, over those of their chunks
    far: float = 1.0  # the same from other nodes
