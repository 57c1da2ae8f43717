"""The order in which shards visit ranks. Pure integer code.

Flat ring: shards move one rank on at every hop. Double ring (BurstAttention, arXiv:2403.09347, section 3.3; LoongTrain,
arXiv:2406.18485): in cycle c, step t, slot i of node n holds the shard of node n - c, slot i - t; the transfer between
nodes starts with its cycle and has all of it to finish, while the steps inside the node fill the cycle.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Order in which every rank meets every shard. node_size == cp_size is the flat ring, smaller the double ring."""

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

    def owner(self, cp_rank: int, hop: int) -> int:
        """CP rank whose shard is on `cp_rank` at `hop`, 0 <= hop < cp_size."""
        node, slot = divmod(cp_rank, self.node_size)
        outer_step, step = divmod(hop, self.node_size)
        return (node - outer_step) % self.nodes * self.node_size + (slot - step) % self.node_size


@dataclass(frozen=True, slots=True)
class RingTraffic:
    """How much of a ring a mask leaves: 1 where every rank works on every shard and needs all of it."""

    stops: float = 1.0  # with work, over all stops
    near: float = 1.0  # tokens a rank receives from ranks of its node, over those of their shards
    far: float = 1.0  # the same from other nodes
