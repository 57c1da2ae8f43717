"""Communicators among the ranks of one context, made at first use and kept: they are expensive.

What is made on demand is collective: all ranks make the same calls in the same order (`Communicators.agree`), and after
a call that failed in the middle later ones are refused (`Communicators.collective`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.comm.agreement import Agreement
from engine.attention.comm.collectives import AllToAll, GroupAllToAll, GroupGather
from engine.attention.comm.exchange import AllPairsP2P, P2PRing, RingComms
from engine.attention.comm.link_speed import MESSAGE_BYTES, across_gib_per_second
from engine.attention.comm.p2p import (
    CallOrder,
    PeerLost,
    PointToPoint,
    Traffic,
    Transport,
    peers_needed,
    quoted,
    timeout_of,
)
from engine.attention.comm.symm_mem.all_to_all import CopyEngineAllToAll
from engine.attention.comm.symm_mem.channel import CopyEngine, copy_engine_unsupported_reason
from engine.attention.comm.symm_mem.peers import agreed_unsupported_reason, report
from engine.attention.comm_volume import CHUNK_SLOTS, GRADIENT_SLOTS
from engine.attention.geometry.layout import Ring
from engine.attention.problem import host_name, shared_node_size


class Communicators:
    """Of one group of context-parallel ranks; of a single rank, which sends nothing, where `group` is None."""

    def __init__(self, group: dist.ProcessGroup | None, size: int, node_size: int) -> None:
        self.group, self.size, self.node_size = group, size, node_size
        self.traffic = Traffic()
        self._agreement: Agreement | None = None
        if group is not None and size > 1:
            self._agreement = Agreement.of(group, timeout_of(group).total_seconds())
        order = CallOrder(self.traffic, self._agreement)
        # Around steps that all ranks take together: raises BrokenContext when such steps have failed before. A single
        # rank's steps fail alone.
        self.collective: Callable[..., AbstractContextManager[None]] = order.kept if size > 1 else _alone
        self.begin_call = order.begin  # the number of a call, the same one on every rank
        self._agreed: dict[int, int] = {}  # hashes of the calls that the ranks have agreed on, and their numbers
        self._rings: dict[tuple[Ring, tuple[int, ...], str], RingComms] = {}
        self._all_to_alls: dict[tuple[tuple[int, ...], str], AllToAll] = {}
        self._gathers: list[GroupGather] = []  # one, once it was asked for
        self._linear: list[PointToPoint] = []  # likewise
        self._across_gib: list[float] = []  # one number, once it was measured
        self._copies: dict[torch.device, str | None] = {}  # by device, why ranks cannot copy to each other

    def agree(self, key: Hashable, said: Mapping[str, object]) -> int:
        """The number of a call, from 1, after all ranks have said the same of it. Collective at its first use, then
        kept.

        Raises ValueError on every rank where they do not, or some rank refuses it; PeerLost, on all that wait, when
        some rank does not come within the timeout; BrokenContext when the process group has been destroyed.
        """
        # By hash, which keeps no mask alive; with the words, because those without fields have equal ones.
        found = hash((key, str(said)))
        if found not in self._agreed:
            if self._agreement is not None:
                with self.collective():
                    try:
                        difference = self._agreement.reached({"node_size": self.node_size, **said})
                    except TimeoutError as late:
                        raise PeerLost(
                            f"rank {dist.get_rank()} waited to begin a new kind of call and {late}; make the same "
                            "calls in the same order on all ranks"
                        ) from late
                    except RuntimeError as error:
                        raise PeerLost(
                            f"rank {dist.get_rank()} was to begin a new kind of call, and the rank that serves the "
                            f"store of their process group has ended ({quoted(error)}); find the first error of all "
                            "ranks"
                        ) from error
                if difference:
                    self.begin_call()  # it is over
                    raise ValueError(difference)
            self._agreed[found] = len(self._agreed) + 1
        return self._agreed[found]

    def refuse(self, error: ValueError) -> None:
        """Tell the other ranks, who may wait, that this one refuses a call, which is over with that. Sends no
        message."""
        if self._agreement is not None:
            self._agreement.refuse(str(error))
            self.begin_call()

    @contextmanager
    def refusals_told(self) -> Iterator[None]:
        """Around checks of a call's arguments: a ValueError goes on, after the other ranks were told of it."""
        try:
            yield
        except ValueError as error:
            self.refuse(error)
            raise

    def copies_unsupported_reason(self, device: torch.device) -> str | None:
        """Why ranks of a node cannot copy into each other's memory, or None: the same answer on every rank.

        On GPUs collective at first use, then kept.
        """
        reason = copy_engine_unsupported_reason(device)
        if device.type != "cuda" or self.group is None or self.size == 1:
            return reason
        if device not in self._copies:
            with self.collective():
                self._copies[device] = agreed_unsupported_reason(self.group, report(device, reason), self.node_size)
        return self._copies[device]

    def across_gib(self, device: torch.device) -> float:
        """GiB per second that each rank sends to the next node while all do, of ranks on several nodes.

        Measured at first use (collective) and kept: the same number on every rank, so that all choose alike.
        """
        if not self._across_gib:
            found = self.measure_link(torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device=device))
            assert found is not None, "several nodes have a group"
            self._across_gib.append(found)
        return self._across_gib[0]

    def measure_link(self, message: Tensor, *, spread: bool = False) -> float | None:
        """The speed of `across_gib`, with messages like `message`, of one size on all ranks; with `spread` an equal
        part of each for every rank of the other nodes. None on one node. Measured now. Collective."""
        if self.group is None or self.node_size == self.size:
            return None
        with self.collective():
            return across_gib_per_second(self.group, self.node_size, message, spread=spread)

    def all_to_all(self, members: Sequence[int], exchange: str) -> AllToAll:
        """Among CP ranks `members`, this one among them: by copy engine, or by the process group (`all_to_all`).

        Collective at first use, then kept.
        """
        key = (tuple(members), exchange)
        if key not in self._all_to_alls:
            with self.collective():
                group = self._subgroup(members, "heads")
                copied = group is not None and exchange == "copy_engine"
                self._all_to_alls[key] = (CopyEngineAllToAll if copied else GroupAllToAll)(group, self.traffic)
        return self._all_to_alls[key]

    def gather(self) -> GroupGather:
        """All-gathers among all ranks, of which there are several. Collective at first use, then kept."""
        if not self._gathers:
            with self.collective():
                group = self._subgroup(range(self.size), "gather")
            assert group is not None, "several ranks have a group"
            self._gathers.append(GroupGather(group, self.traffic))
        return self._gathers[0]

    def linear(self) -> PointToPoint:
        """Transfers of linear layers among all ranks, of which there are several. Collective at first use, then
        kept."""
        if not self._linear:
            group = self._subgroup(range(self.size), "linear")
            assert group is not None, "several ranks have a group"
            self._linear.append(PointToPoint(group, self.traffic))
        return self._linear[0]

    def ring(self, ring: Ring, cp_ranks: Sequence[int], rank: int, exchange: str) -> RingComms:
        """The communication of a ring among `cp_ranks`, of which this one is number `rank`. Collective at first use,
        then kept."""
        key = (ring, tuple(cp_ranks), exchange)
        if key not in self._rings:
            with self.collective():
                self._rings[key] = self._make_ring(ring, cp_ranks, rank, exchange)
        return self._rings[key]

    def _make_ring(self, ring: Ring, cp_ranks: Sequence[int], rank: int, exchange: str) -> RingComms:
        node, local_rank = divmod(rank, ring.node_size)
        inner_ring = cp_ranks[node * ring.node_size : (node + 1) * ring.node_size]
        pattern = P2PRing if exchange == "relay" else AllPairsP2P
        chunks = self._transport(inner_ring, "chunks", exchange)
        gradients = self._transport(inner_ring, "gradients", exchange)
        intra_node = pattern(local_rank=local_rank, size=ring.node_size, chunks=chunks, gradients=gradients)
        if ring.nodes == 1:
            return RingComms(intra_node)
        column = cp_ranks[local_rank :: ring.node_size]
        return RingComms(
            intra_node, self._transport(column, "inter_node"), self._transport(column, "inter_node_gradients")
        )

    def _transport(self, cp_ranks: Sequence[int], purpose: str, exchange: str = "direct") -> Transport:
        """Transfers among some CP ranks, on a communicator that nothing else uses."""
        group = self._subgroup(cp_ranks, purpose)
        if group is None:
            return Transport()
        if exchange == "copy_engine":
            slots = {"chunks": CHUNK_SLOTS, "gradients": GRADIENT_SLOTS}[purpose]
            return CopyEngine(group, self.traffic, slots)
        return PointToPoint(group, self.traffic)

    def _subgroup(self, cp_ranks: Sequence[int], purpose: str) -> dist.ProcessGroup | None:
        """A communicator of some CP ranks; None for a single rank."""
        if len(cp_ranks) == 1 or self.group is None:
            return None
        world = dist.get_process_group_ranks(self.group)
        _refuse_unequal_groups(self.group)
        return dist.new_group(
            [world[rank] for rank in cp_ranks],
            timeout=timeout_of(self.group),
            use_local_synchronization=True,
            group_desc=f"attention_{purpose}",
        )


def _refuse_unequal_groups(group: dist.ProcessGroup) -> None:
    """Raises ValueError, on all ranks alike, where they are in unequal numbers of process groups. torch counts those
    into the name of a group that its members make alone, and they would wait for each other until the timeout."""
    counts = [0] * group.size()
    with peers_needed(group, "the other ranks"):
        dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_names), group=group)
    if min(counts) < max(counts):
        raise ValueError(
            f"the ranks that share a sequence are in {min(counts)} to {max(counts)} process groups, so torch would "
            "name a group of theirs differently on each; let all be in as many, by new_group for the other ranks too"
        )


def found_node_size(group: dist.ProcessGroup | None, size: int) -> int:
    """Consecutive ranks that share a host, the same number on every host. Collective."""
    if group is None or size == 1:
        return 1
    hosts: list[str] = [""] * size
    with peers_needed(group, "the other ranks"):
        dist.all_gather_object(hosts, host_name(), group=group)
    return shared_node_size(hosts)


def _alone(*_: object, **__: object) -> AbstractContextManager[None]:
    """`CallOrder.kept` of a single rank."""
    return nullcontext()
