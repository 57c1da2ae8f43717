"""Context parallelism as one value: the ranks that share a sequence, the positions of each, their communication."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from engine.attention.comm.agreement import Agreement
from engine.attention.comm.all_to_all import AllToAll, GroupAllToAll
from engine.attention.comm.exchange import AllPairsP2P, P2PRing, RingComms
from engine.attention.comm.gather import GroupGather
from engine.attention.comm.link_speed import MESSAGE_BYTES, Link, across_gib_per_second
from engine.attention.comm.p2p import (
    CallOrder,
    NoTransport,
    PeerLost,
    PointToPoint,
    Traffic,
    Transport,
    peers_needed,
    timeout_of,
)
from engine.attention.comm.symm_mem.all_to_all import CopyEngineAllToAll
from engine.attention.comm.symm_mem.channel import copy_engine_unsupported_reason
from engine.attention.comm.symm_mem.copy_engine import CopyEngine
from engine.attention.comm.symm_mem.peers import agreed_unsupported_reason, report
from engine.attention.comm.topology import host_name, shared_node_size
from engine.attention.geometry.layout import (
    Gathered,
    Layout,
    Segment,
    as_layout,
    rows_before,
    split_unsupported_reason,
)
from engine.attention.geometry.ring import Ring
from engine.attention.plan_cache import PlanCache
from engine.attention.planning.cost_model import HardwareModel
from engine.attention.planning.receive_slots import CHUNK_SLOTS, GRADIENT_SLOTS
from engine.ops.autograd import accumulation_dtype, refuse_second_derivative

_MESH_DIM = "cp"  # of a mesh of several dimensions

_numbers = itertools.count()


class ContextParallel:
    """The ranks that hold one sequence between them.

    Args:
        group: process group of the context-parallel ranks, or a DeviceMesh of one dimension (`mesh["NAME"]` is one of a
            larger mesh; of a mesh with several the dimension `cp` is taken). None means all ranks, or a group of one
            where a single rank was started and torch.distributed is not initialised.
        node_size: consecutive CP ranks that share a node; found from host names when None (NCCL_HOSTID, which emulates
            nodes for NCCL, is honoured; hosts with unequal numbers of ranks count as several nodes of equal ones).
        layout: contiguous, zigzag or striped, or a layout of `engine.attention.geometry.layout` such as SplitZigzag.

    Raises ValueError for a group that this rank is not in, a node_size that does not divide it, and without a group
    where several ranks were started and torch.distributed is not initialised.

    Creating one is collective over `group`, and so is the first attention call with a new schedule or exchange. An
    exception in the middle of a collective call leaves the ranks in disagreement: from then on every call raises
    `engine.attention.comm.p2p.BrokenContext` on this rank, and the others' calls end with the group's timeout.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        node_size: int | None = None,
        layout: str | Layout = "zigzag",
    ) -> None:
        if isinstance(group, DeviceMesh):
            group = _group_of_mesh(group)
        elif group is None and dist.is_initialized():
            group = dist.group.WORLD
        elif group is None:
            _check_alone()
        elif not isinstance(group, dist.ProcessGroup) and group is not dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"group is a {type(group).__name__}; pass a process group, a DeviceMesh, or None for all ranks"
            )
        self._set_up(group, node_size, layout)

    @classmethod
    def single(cls, layout: str | Layout = "zigzag") -> ContextParallel:
        """A group of one, also where torch.distributed is initialised: the whole sequence on this rank."""
        alone = cls.__new__(cls)
        alone._set_up(None, None, layout)
        return alone

    def _set_up(
        self,
        group: dist.ProcessGroup | None,
        node_size: int | None,
        layout: str | Layout,
        traffic: Traffic | None = None,
        order: CallOrder | None = None,
    ) -> None:
        self.layout: Layout = as_layout(layout)
        self.traffic = traffic or Traffic()
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self._agreement: Agreement | None = None
        if group is not None and self.size > 1 and order is None:
            self._agreement = Agreement.of(group, timeout_of(group).total_seconds())
        self._order = order or CallOrder(self.traffic, self._agreement)
        # Around steps that all ranks take together: raises BrokenContext when such steps have failed before.
        self.collective: Callable[..., AbstractContextManager[None]] = self._order.kept if self.size > 1 else _alone
        self.begin_call = self._order.begin  # the number of an attention call, the same one on every rank
        self._agreed: dict[int, int] = {}  # hashes of the calls that the ranks have agreed on, and their numbers
        self.plan_number = 0  # of the plan that this context is part of
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the group it was given; pass a group of its own")
        if node_size is not None and (node_size < 1 or self.size % node_size):
            raise ValueError(f"node_size {node_size} does not divide cp_size {self.size}; give ranks per node that do")
        self._ring_comms: dict[tuple[Ring, str], RingComms] = {}
        self._link_gib: list[float] = []  # one number, once it was measured
        self._copies: dict[torch.device, str | None] = {}  # by device, why ranks cannot copy to each other
        self._all_to_alls: dict[tuple[str, str], tuple[AllToAll, tuple[int, ...], ContextParallel]] = {}
        self._gathers: list[GroupGather] = []  # one, once it was asked for
        self.node_size = node_size or self._find_node_size()
        self.name = f"context {next(_numbers)}"  # of this process alone
        self.plans = PlanCache()  # of attention among these ranks

    def without_plans(self, number: int) -> ContextParallel:
        """This context with a cache of its own, for the plan of that number. A cached plan holds it: holding the
        cache's owner, a plan would keep communicators and buffers in memory until the garbage collector finds the
        circle."""
        other = copy.copy(self)
        other.plans, other.plan_number = PlanCache(), number
        return other

    def agree(self, key: Hashable, said: Callable[[], Mapping[str, object]]) -> int:
        """The number of a call, from 1, after all ranks have said the same of it. Collective at its first use, then
        kept.

        Raises ValueError on every rank where they do not, or some rank refuses it; PeerLost, on all that wait, when
        some rank does not come within the timeout.
        """
        found = hash(key)
        if found not in self._agreed:
            if self._agreement is not None:
                facts = {"node_size": self.node_size, "layout": str(self.layout), **said()}
                with self.collective():
                    try:
                        difference = self._agreement.reached(facts)
                    except TimeoutError as late:
                        raise PeerLost(
                            f"rank {dist.get_rank()} waited to begin a new kind of call and {late}; make the same "
                            "calls in the same order on all ranks"
                        ) from late
                if difference:
                    raise ValueError(difference)
            self._agreed[found] = len(self._agreed) + 1
        return self._agreed[found]

    def refuse(self, error: ValueError) -> None:
        """Tell the other ranks, who may wait, that this one refuses a call. Sends no message."""
        if self._agreement is not None:
            self._agreement.refuse(str(error))

    def _find_node_size(self) -> int:
        """Consecutive ranks that share a host, the same number on every host."""
        if self.size == 1:
            return 1
        hosts: list[str] = [""] * self.size
        assert self.group is not None, "several ranks have a group"
        with peers_needed(self.group, "the other ranks"):
            dist.all_gather_object(hosts, host_name(), group=self.group)
        return shared_node_size(hosts)

    def ring(self, schedule: str) -> Ring:
        """The order of a ring: one ring of all ranks (`ring`), or rings inside nodes joined by one between them.

        Raises ValueError when the schedule is unknown.
        """
        if schedule not in ("ring", "double_ring"):
            raise ValueError(f"schedule {schedule!r} is unknown; choose auto, ring or double_ring")
        return Ring(cp_size=self.size, node_size=self.size if schedule == "ring" else self.node_size)

    def _copies_unsupported_reason(self, device: torch.device) -> str | None:
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

    def choose_exchange(self, exchange: str, ring: Ring, device: torch.device) -> str:
        """The exchange that `exchange` resolves to: for `auto` the fastest that the links inside `ring` allow.

        Raises ValueError when the named one cannot run here.
        """
        spans_nodes = ring.node_size > self.node_size
        reason = self._copies_unsupported_reason(device) or (
            f"exchange copy_engine copies inside a node and this ring has {ring.node_size} ranks over nodes of "
            f"{self.node_size}; choose schedule double_ring or exchange relay"
            if spans_nodes
            else None
        )
        if exchange == "auto":
            return "relay" if spans_nodes else "direct" if reason else "copy_engine"
        if exchange not in ("relay", "direct", "copy_engine"):
            raise ValueError(f"exchange {exchange!r} is unknown; choose auto, relay, direct or copy_engine")
        if exchange == "copy_engine" and reason and self.size > 1:
            raise ValueError(reason)
        return exchange

    def all_to_all(
        self, schedule: str, exchange: str, device: torch.device
    ) -> tuple[AllToAll, tuple[int, ...], ContextParallel]:
        """For a Ulysses schedule: the all-to-all, the CP ranks in it, and the ranks that share the sequence after it.

        By copy engine where `exchange` allows it and all ranks of the all-to-all share a node; else by the process
        group. Collective at first use, then kept. Raises ValueError when exchange copy_engine cannot run.
        """
        inside = schedule == "usp" or self.node_size == self.size
        no_copies = self._copies_unsupported_reason(device)
        if exchange == "copy_engine" and self.size > 1:
            spans_nodes = (
                f"exchange copy_engine copies inside a node and nodes are of {self.node_size}; choose exchange auto"
            )
            reason = no_copies if inside or schedule != "ulysses" else spans_nodes
            if reason:
                raise ValueError(reason)
        copied = inside and exchange in ("auto", "copy_engine") and no_copies is None
        key = (schedule, "copy_engine" if copied else "all_to_all")
        if key not in self._all_to_alls:
            with self.collective():
                self._all_to_alls[key] = self._make_all_to_all(*key)
        return self._all_to_alls[key]

    def _make_all_to_all(self, schedule: str, how: str) -> tuple[AllToAll, tuple[int, ...], ContextParallel]:
        node, local_rank = divmod(self.rank, self.node_size)
        nodes = [tuple(range(first, first + self.node_size)) for first in range(0, self.size, self.node_size)]
        columns = [tuple(range(first, self.size, self.node_size)) for first in range(self.node_size)]
        all_ranks = [tuple(range(self.size))]
        groups, mine, others = {
            "ulysses": (all_ranks, 0, (self.rank,)),
            "usp": (nodes, node, columns[local_rank]),
            "usp_transposed": (columns, local_rank, nodes[node]),
        }[schedule]
        group = self._subgroup(groups[mine], "heads")
        all_to_all: AllToAll = GroupAllToAll(group, self.traffic)
        if group is not None and how == "copy_engine":
            all_to_all = CopyEngineAllToAll(group, self.traffic)
        inner = ContextParallel.__new__(ContextParallel)
        inside = len(others) if schedule == "usp_transposed" else 1
        layout = Gathered(self.layout, tuple(groups))
        after = self._subgroup(others, "after_heads")
        inner._set_up(after, inside, layout, self.traffic, self._order)
        return all_to_all, groups[mine], inner

    def gather(self) -> GroupGather:
        """All-gathers among all ranks, of which there are several. Collective at first use, then kept."""
        if not self._gathers:
            with self.collective():
                group = self._subgroup(range(self.size), "gather")
            assert group is not None, "several ranks have a group"
            self._gathers.append(GroupGather(group, self.traffic))
        return self._gathers[0]

    def link(self, device: torch.device, *, fixed: bool = False) -> Link | None:
        """The speed at which each rank sends to the next node while all do; None on one node.

        Measured at first use (collective) and kept: the same number on every rank, so that all choose alike. `fixed`
        takes the cost model's constant instead, which is the same in every run.
        """
        if self.node_size == self.size:
            return None
        if fixed:
            return Link(HardwareModel().across_gib, measured=False)
        if not self._link_gib:
            found = self.measure_link(torch.empty(MESSAGE_BYTES, dtype=torch.uint8, device=device))
            assert found is not None, "several nodes have a group"
            self._link_gib.append(found)
        return Link(self._link_gib[0], measured=True)

    def measure_link(self, message: Tensor, *, spread: bool = False) -> float | None:
        """The speed of `link`, in GiB per second, with messages like `message`, of one size on all ranks; with `spread`
        an equal part of each for every rank of the other nodes.

        Measured now. Collective.
        """
        if self.group is None or self.node_size == self.size:
            return None
        with self.collective():
            return across_gib_per_second(self.group, self.node_size, message, spread=spread)

    def _subgroup(self, cp_ranks: Sequence[int], purpose: str) -> dist.ProcessGroup | None:
        """A communicator of some CP ranks; None for a single rank."""
        if len(cp_ranks) == 1 or self.group is None:
            return None
        world = dist.get_process_group_ranks(self.group)
        return dist.new_group(
            [world[rank] for rank in cp_ranks],
            timeout=timeout_of(self.group),
            use_local_synchronization=True,
            group_desc=f"attention_{purpose}",
        )

    def ring_comms(self, ring: Ring, exchange: str) -> RingComms:
        """The communication of `ring`, made at first use (collective) and kept: communicators are expensive."""
        key = (ring, exchange)
        if key not in self._ring_comms:
            with self.collective():
                self._ring_comms[key] = self._make_ring_comms(ring, exchange)
        return self._ring_comms[key]

    def _make_ring_comms(self, ring: Ring, exchange: str) -> RingComms:
        node, local_rank = divmod(self.rank, ring.node_size)
        inner_ring = range(node * ring.node_size, (node + 1) * ring.node_size)
        pattern = P2PRing if exchange == "relay" else AllPairsP2P
        chunks = self._transport(inner_ring, "chunks", exchange)
        gradients = self._transport(inner_ring, "gradients", exchange)
        intra_node = pattern(local_rank=local_rank, size=ring.node_size, chunks=chunks, gradients=gradients)
        if ring.nodes == 1:
            return RingComms(intra_node)
        column = range(local_rank, self.size, ring.node_size)
        return RingComms(
            intra_node, self._transport(column, "inter_node"), self._transport(column, "inter_node_gradients")
        )

    def _transport(self, cp_ranks: range, purpose: str, exchange: str = "direct") -> Transport:
        """Transfers among some CP ranks, on a communicator that nothing else uses."""
        group = self._subgroup(cp_ranks, purpose)
        if group is None:
            return NoTransport()
        if exchange == "copy_engine":
            slots = {"chunks": CHUNK_SLOTS, "gradients": GRADIENT_SLOTS}[purpose]
            return CopyEngine(group, self.traffic, slots)
        return PointToPoint(group, self.traffic)

    def segments(self, seq_len: int) -> tuple[Segment, ...]:
        """Runs of global positions this rank holds. Raises ValueError, naming the nearest lengths, when it cannot."""
        if seq_len < 0:
            raise ValueError(f"seq_len {seq_len} is no length; give the tokens of the whole sequence")
        unsupported_reason = split_unsupported_reason(self.layout, seq_len, self.size)
        if unsupported_reason:
            raise ValueError(unsupported_reason)
        return self.layout.segments(seq_len, self.size, self.rank)

    def rows_before(self, cut: int, seq_len: int) -> int:
        """Number of this rank's tokens before global position `cut`: its first ones."""
        return rows_before(self.layout.segments(seq_len, self.size, self.rank), cut)

    def positions(self, seq_len: int, device: torch.device | None = None) -> Tensor:
        """Global position of each local token, int64 of length seq_len / size. For RoPE and labels.

        Raises ValueError, naming the nearest lengths, when the layout cannot split `seq_len`.
        """
        self.segments(seq_len)
        return self._positions_of(self.rank, seq_len).to(device)

    def _positions_of(self, cp_rank: int, seq_len: int) -> Tensor:
        segments = self.layout.segments(seq_len, self.size, cp_rank)
        return torch.cat([torch.arange(s.start, s.start + s.count * s.step, s.step) for s in segments])

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a whole-sequence tensor (the same on every rank), in local order.

        Differentiable: the gradient of the whole is this rank's at its own tokens and 0 at all others, so that the sum
        over ranks is the gradient of the sum of their losses.
        """
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(
                f"dim {dim} is none of the {tensor.ndim} dimensions of the tensor; give that of its tokens"
            )
        segments = self.segments(tensor.shape[dim])
        if self.size == 1:
            return tensor
        parts = []
        for segment in segments:
            run = tensor.narrow(dim, segment.start, (segment.count - 1) * segment.step + 1)
            parts.append(run[(slice(None),) * (dim % tensor.ndim) + (slice(None, None, segment.step),)])
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0].contiguous()

    def unshard(self, tensor: Tensor, dim: int = 1, *, gradient: str = "sum") -> Tensor:
        """The whole-sequence tensor from every rank's tokens: `shard` undone. Collective, and differentiable.

        Args:
            tensor: this rank's tokens, of the same shape and dtype on every rank.
            dim: the dimension of the tokens.
            gradient: what backward gives this rank's tokens. `sum`: the gradient of the *sum* of all ranks' losses; the
                ranks' gradients of the whole are added, and backward is collective. Where every rank forms the same
                loss of the whole, that is `size` times its gradient: divide the loss by `size`, or take `same`, which
                says that all ranks have one loss and one gradient: backward takes this rank's part of it and sends
                nothing.

        Raises ValueError when no shard has this length, or `gradient` is unknown.
        """
        if gradient not in ("sum", "same"):
            raise ValueError(f"gradient {gradient!r} is unknown; choose sum or same")
        if self.size == 1:
            return tensor
        self.segments(tensor.shape[dim] * self.size)  # refuses lengths no shard has
        facts = {"unshard": tuple(tensor.shape), "dim": dim % tensor.ndim, "dtype": str(tensor.dtype)}
        self.agree(tuple(facts.items()), lambda: facts)
        whole: Tensor = _Unshard.apply(tensor, self, dim, gradient)
        return whole

    def _gathered(self, tensor: Tensor, dim: int) -> Tensor:
        """All ranks' tokens in order of position. Collective."""
        shards = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        assert self.group is not None, "several ranks have a group"
        with self.collective(), peers_needed(self.group, "all other ranks"):
            dist.all_gather(shards, tensor.detach().contiguous(), group=self.group)
        gathered = torch.cat(shards, dim)
        return torch.empty_like(gathered).index_copy_(dim, self._rank_order(tensor.shape[dim], tensor.device), gathered)

    def _rank_order(self, tokens: int, device: torch.device) -> Tensor:
        """Global positions of rank 0's tokens, rank 1's, ..."""
        return torch.cat([self._positions_of(rank, tokens * self.size) for rank in range(self.size)]).to(device)

    def _summed_shard(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's tokens of the sum of all ranks' tensors. Collective.

        The sum is formed in rank order in the accumulation dtype: the same bits in every run.
        """
        tokens = whole.shape[dim] // self.size
        by_rank = whole.index_select(dim, self._rank_order(tokens, whole.device)).split(tokens, dim)
        sent = torch.stack([part.contiguous() for part in by_rank])
        received = torch.empty_like(sent)
        assert self.group is not None, "several ranks have a group"
        with self.collective(), peers_needed(self.group, "all other ranks"):
            dist.all_to_all_single(received, sent, group=self.group)
        return received.to(accumulation_dtype(whole.dtype)).sum(dim=0).to(whole.dtype)


class _Unshard(torch.autograd.Function):
    """All ranks' tokens in order of position; backward as `ContextParallel.unshard` says."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cp: ContextParallel, dim: int, gradient: str) -> Tensor:
        ctx.cp, ctx.dim, ctx.gradient = cp, dim, gradient
        return cp._gathered(tensor, dim)

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("unshard")
        shard = ctx.cp.shard if ctx.gradient == "same" else ctx.cp._summed_shard
        return shard(dwhole, ctx.dim), None, None, None


def _alone(*_: object, **__: object) -> AbstractContextManager[None]:
    """`CallOrder.kept` of a single rank, whose steps fail alone."""
    return nullcontext()


def _check_alone() -> None:
    """Raises ValueError where this process is one of several ranks: alone, each would attend to its own tokens only."""
    launched = os.environ.get("WORLD_SIZE") or "1"  # torchrun sets it, and so do most launchers
    if launched != "1":
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        raise ValueError(
            f"this process is one of {launched} ranks (WORLD_SIZE) and torch.distributed is not initialised, so ranks "
            f'cannot share a sequence; call torch.distributed.init_process_group("{backend}") before it, or make '
            "ContextParallel.single() where each rank has a sequence of its own"
        )


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of a mesh of one dimension, or of its dimension `cp`. Raises ValueError when there is none."""
    if mesh.ndim == 1:
        return mesh.get_group()
    names = mesh.mesh_dim_names or ()
    if _MESH_DIM not in names:
        found = ", ".join(names) if names else f"{mesh.ndim} without names"
        raise ValueError(
            f"the mesh has several dimensions ({found}) and none is named {_MESH_DIM}; pass mesh['NAME'] of the "
            "dimension that shares a sequence"
        )
    return mesh.get_group(_MESH_DIM)
