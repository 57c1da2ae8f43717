"""A rank's place among the others, as the environment variables of torchrun say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.base.errors import UsageError

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_LINE = (
    "torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr HOST --master-port 29500 "
    "-m harness train CONFIG.yaml --torchrun"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One rank of `ranks`, of which each host has `local_ranks` consecutive ones."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    master: str  # name or address of the first host
    port: int

    @property
    def node(self) -> int:
        """Number of this rank's host."""
        return self.rank // self.local_ranks

    @property
    def nodes(self) -> int:
        return self.ranks // self.local_ranks

    @property
    def leads(self) -> bool:
        """Whether this rank answers for its host."""
        return self.local_rank == 0


def place_of(environment: Mapping[str, str]) -> Place:
    """Raises UsageError when torchrun did not start this process, or its hosts have different numbers of ranks."""
    for name in (*_NUMBERS, "MASTER_ADDR"):
        if not environment.get(name):
            raise UsageError(
                f"--torchrun: {name} is not set, as torchrun sets it for the ranks it starts; start {_LINE}"
            )
        if name in _NUMBERS and not environment[name].isdecimal():
            raise UsageError(f"--torchrun: {name} is {environment[name]!r}, expected a number; start {_LINE}")
    rank, ranks, local_rank, local_ranks, port = (int(environment[name]) for name in _NUMBERS)
    if not 0 < port < 65536:
        raise UsageError(f"--torchrun: MASTER_PORT is {port}, expected 1 to 65535; give another --master-port")
    if not local_ranks or ranks % local_ranks or rank % local_ranks != local_rank:
        raise UsageError(
            f"--torchrun: {local_ranks} of {ranks} ranks are on this host, which is not the same number on every host; "
            "give each the same --nproc-per-node"
        )
    return Place(
        rank=rank,
        ranks=ranks,
        local_rank=local_rank,
        local_ranks=local_ranks,
        master=environment["MASTER_ADDR"],
        port=port,
    )
