"""A rank's place among the hosts, as the environment variables of torchrun say, and hosts that watch each other.

torchrun itself notices no host that falls silent. One rank per host, its leader, counts in the store and reads the
other leaders' counts. The other ranks of a host look whether their leader still runs.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base.errors import UsageError
from harness.launch.zygote import fields_of

if TYPE_CHECKING:
    from torch.distributed import Store

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


BEAT_SECONDS = 2.0
LOST_SECONDS = 20.0  # a host whose count stands still for so long is lost
_LEADER_SECONDS = 1.0  # between looks at the leader


class HostsWatch:
    """Threads of a leader. `lost` is called there with a host's number and the reason, and ends the process."""

    def __init__(self, store: Callable[[], Store], node: int, nodes: int, lost: Callable[[int, str], None]) -> None:
        """`store` makes a connection of the thread's own."""
        self._connect, self._node, self._nodes, self._lost = store, node, nodes, lost
        self._over = threading.Event()
        self._answered_at = time.monotonic()  # when the store last did
        if nodes > 1:
            for target in (self._watch, self._guard):
                threading.Thread(target=target, daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        others = [node for node in range(self._nodes) if node != self._node]
        counts: dict[int, bytes] = {}
        changed = dict.fromkeys(others, time.monotonic())
        beats = 0
        try:
            store = self._connect()
            while not self._over.wait(BEAT_SECONDS):
                beats += 1
                self._answered_at = time.monotonic()
                store.set(beat_key(self._node), str(beats))
                for node in others:
                    if store.check([ended_key(node)]):  # it ends by itself, and says why
                        changed[node] = time.monotonic()
                        continue
                    count = store.get(beat_key(node))
                    if counts.get(node) != count:
                        counts[node], changed[node] = count, time.monotonic()
                    elif time.monotonic() - changed[node] > LOST_SECONDS and not self._over.is_set():
                        self._lost(node, f"no word for {LOST_SECONDS:g} s")
        except RuntimeError:  # the store is on the first host
            if not self._over.is_set():
                self._lost(0, "its torchrun has ended")

    def _guard(self) -> None:
        """The store's host may fall silent: a question to the store then waits without end."""
        while not self._over.wait(BEAT_SECONDS):
            if time.monotonic() - self._answered_at > LOST_SECONDS:
                self._lost(0, f"no word for {LOST_SECONDS:g} s")


def beat_key(node: int) -> str:
    return f"beat{node}"


def ended_key(node: int) -> str:
    return f"ended{node}"


def follow(leader: int, over: threading.Event) -> None:
    """End this process, from a thread, when the process `leader` of the same host has ended before `over`."""

    def look() -> None:
        while not over.wait(_LEADER_SECONDS):
            if has_ended(leader):
                os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def has_ended(pid: int) -> bool:
    """Whether a process has ended, also one that nothing has reaped yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return fields_of(stat)[0] in "ZX"
