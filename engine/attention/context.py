"""Context parallelism as a value: the ranks that share a sequence and the positions of each."""

from __future__ import annotations

import copy
import itertools
import os
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from threading import Lock
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from engine.attention.comm.communicators import Communicators, found_node_size
from engine.attention.comm.p2p import peers_needed, send_rows
from engine.attention.geometry.balanced import Balanced
from engine.attention.geometry.layout import (
    Layout,
    Segment,
    ZigzagOfDocuments,
    as_layout,
    rows_before,
    split_unsupported_reason,
)
from engine.attention.inputs import check_sent
from engine.attention.masks import Documents, Mask
from engine.attention.problem import Division
from engine.ops.autograd import accumulation_dtype, refuse_second_derivative

MAX_PLANS = 64  # of a context: layers share one, and masks that differ every step pass through
_MESH_DIM = "cp"  # of a mesh of several dimensions

Plan = TypeVar("Plan")

_numbers = itertools.count()
_contexts: weakref.WeakValueDictionary[str, ContextParallel] = weakref.WeakValueDictionary()
_shared: weakref.WeakSet[ContextParallel] = weakref.WeakSet()  # those of several ranks


def ranks_of_shared_context() -> int:
    """Ranks of a context of several that this process made and still holds; 0 where there is none."""
    return max((context.size for context in _shared), default=0)


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

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Itself: a copy of a model attends over the same ranks."""
        return self

    def __copy__(self) -> ContextParallel:
        """A context of its own that shares everything with this one; `copy.copy` would ask `__reduce__`."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ContextParallel cannot be pickled, because its process groups belong to this process; save the model's "
            "state_dict(), and create a ContextParallel where it is loaded"
        )

    def _set_up(self, group: dist.ProcessGroup | None, node_size: int | None, layout: str | Layout) -> None:
        self.layout: Layout = as_layout(layout)
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the group it was given; pass a group of its own")
        if node_size is not None and (node_size < 1 or self.size % node_size):
            raise ValueError(f"node_size {node_size} does not divide cp_size {self.size}; give ranks per node that do")
        self.node_size = node_size or found_node_size(group, self.size)
        self.comms = Communicators(group, self.size, self.node_size)
        self.traffic = self.comms.traffic  # bytes that this rank has sent
        self.collective = self.comms.collective  # around steps that all ranks take together
        if self.size > 1:
            _shared.add(self)
        self._name()
        self.plans: PlanCache[Any] = PlanCache()  # `AttentionPlan`s among these ranks, of a higher layer
        self.plan_number = 0  # of the plan that this context is part of

    def _name(self) -> None:
        """A name in compiled programs, of this process alone."""
        self.name = f"context {next(_numbers)}"
        _contexts[self.name] = self

    def agree(self, key: Hashable, said: Mapping[str, object]) -> int:
        """`Communicators.agree` on a call and on the layout of its shards."""
        return self.comms.agree((self.layout, key), {"layout": str(self.layout), **said})

    def without_plans(self, number: int) -> ContextParallel:
        """This context with a cache of its own, for the plan of that number. A cached plan holds it: holding the
        cache's owner, a plan would keep communicators and buffers in memory until the garbage collector finds the
        circle."""
        other = copy.copy(self)
        other.plans, other.plan_number = PlanCache(), number
        return other

    def under(self, mask: Mask) -> ContextParallel:
        """These ranks as they share a sequence of this mask: where the layout deals documents, it deals those of the
        mask, with plans of their own."""
        layout = self.layout
        if self.size == 1 or not isinstance(layout, Balanced | ZigzagOfDocuments) or not isinstance(mask, Documents):
            return self
        other = copy.copy(self)
        other._name()  # its shards are others
        other.plans = PlanCache()
        other.layout = mask.dealt(layout)
        return other

    def ring_of(self, division: Division) -> ContextParallel:
        """The ranks that share the sequence after the all-to-all of a division, as they are among each other. They use
        the communicators of all."""
        if division.shared_by == 1:
            return self
        other = copy.copy(self)
        other.rank, other.size, other.node_size = (
            division.ring_rank(self.rank), division.ring.cp_size, division.node_size
        )  # fmt: skip
        other.layout = division.layout
        return other

    def segments(self, seq_len: int) -> tuple[Segment, ...]:
        """Runs of global positions this rank holds. Raises ValueError, naming the nearest lengths, when it cannot."""
        if not hasattr(seq_len, "__index__") or seq_len < 0:
            raise ValueError(f"seq_len {seq_len!r} is no length; give the number of tokens of the whole sequence")
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
        """This rank's tokens of a whole-sequence tensor (the same on every rank), in local order: a view of it where
        they are one run of memory, else a copy; do not write to it.

        Differentiable: the gradient of the whole is this rank's at its own tokens and 0 at all others, so that the sum
        over ranks is the gradient of the sum of their losses.
        """
        _check_dim(tensor, dim, "the whole sequence")
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

        Raises ValueError when no shard has this length, `dim` is none of the tensor's, or `gradient` is unknown.
        """
        with self.comms.refusals_told():
            if gradient not in ("sum", "same"):
                raise ValueError(f"gradient {gradient!r} is unknown; choose sum or same")
            _check_dim(tensor, dim, "this rank's tokens")
            self.segments(tensor.shape[dim] * self.size)  # refuses lengths no shard has
            if self.size == 1:
                return tensor
            if not torch.compiler.is_compiling():
                check_sent(tensor)
        facts = {"unshard": tuple(tensor.shape), "dim": dim % tensor.ndim, "dtype": str(tensor.dtype)}
        facts["gradient"] = gradient
        kind = self.agree(tuple(facts.items()), facts)
        whole: Tensor = _Unshard.apply(tensor, self, dim, gradient, self.comms.begin_call(), kind)
        return whole

    def _gathered(self, tensor: Tensor, dim: int, call: int, kind: int) -> Tensor:
        """All ranks' tokens in order of position. `call`: the number of this call, `kind` that of such calls.
        Collective."""
        own = tensor.detach().contiguous()
        shards = own.new_empty(self.size, *own.shape)
        assert self.group is not None, "several ranks have a group"
        with self.comms.collective(call, plan=kind), peers_needed(self.group, "all other ranks"):
            if own.is_cuda:
                dist.all_gather(list(shards), own, group=self.group)
            else:  # gloo's collectives take a message of another size or dtype, and return garbage
                for work in send_rows(own[None], shards, self.group, self.traffic.tag):
                    work.wait()
        gathered = torch.cat(tuple(shards), dim)
        return torch.empty_like(gathered).index_copy_(dim, self.rank_order(tensor.shape[dim], tensor.device), gathered)

    def rank_order(self, tokens: int, device: torch.device) -> Tensor:
        """Global positions of rank 0's tokens, rank 1's, ..."""
        return torch.cat([self._positions_of(rank, tokens * self.size) for rank in range(self.size)]).to(device)

    def _summed_shard(self, whole: Tensor, dim: int, call: int, kind: int) -> Tensor:
        """This rank's tokens of the sum of all ranks' tensors, `call` and `kind` as of `_gathered`. Collective.

        The sum is formed in rank order in the accumulation dtype: the same bits in every run.
        """
        tokens = whole.shape[dim] // self.size
        by_rank = whole.index_select(dim, self.rank_order(tokens, whole.device)).split(tokens, dim)
        sent = torch.stack([part.contiguous() for part in by_rank])
        received = torch.empty_like(sent)
        assert self.group is not None, "several ranks have a group"
        with self.comms.collective(call, plan=kind, backward=True), peers_needed(self.group, "all other ranks"):
            if sent.is_cuda:
                dist.all_to_all_single(received, sent, group=self.group)
            else:
                for work in send_rows(sent, received, self.group, self.traffic.tag):
                    work.wait()
        return received.to(accumulation_dtype(whole.dtype)).sum(dim=0).to(whole.dtype)


def context_named(name: str) -> ContextParallel:
    """The context of this name. Raises ValueError where it no longer exists."""
    found = _contexts.get(name)
    if found is None:
        raise ValueError("the ContextParallel of a compiled attention call no longer exists; keep it with the program")
    return found


class PlanCache(Generic[Plan]):
    """The plans used last, by everything that decided them: shapes, dtype, device, mask and choices.

    A plan holds no tensors and nothing of a stream, so calls under `no_grad`, on several streams and from several
    threads share it. What is collective about planning is kept by `Communicators`, for as long as the context lives: a
    plan that was dropped is made again without a message. All ranks make the same calls, so they keep and drop the same
    plans.
    """

    def __init__(self, size: int = MAX_PLANS) -> None:
        self._size = size
        self._plans: OrderedDict[Hashable, Plan] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable) -> Plan | None:
        """The plan of `key`, or None."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
            return plan

    def put(self, key: Hashable, plan: Plan) -> Plan:
        """Keep `plan`, and drop the one that was not used for longest. Returns the plan that is kept: another thread's
        where that came first."""
        with self._lock:
            plan = self._plans.setdefault(key, plan)
            self._plans.move_to_end(key)
            if len(self._plans) > self._size:
                self._plans.popitem(last=False)
            return plan

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._plans.clear()


class _Unshard(torch.autograd.Function):
    """All ranks' tokens in order of position; backward as `ContextParallel.unshard` says."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cp: ContextParallel, dim: int, gradient: str, call: int, kind: int) -> Tensor:
        ctx.cp, ctx.dim, ctx.gradient, ctx.numbers = cp, dim, gradient, (call, kind)
        return cp._gathered(tensor, dim, call, kind)

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor | None, ...]:
        same = ctx.gradient == "same"
        refuse_second_derivative("unshard", None if same else dwhole)
        found = ctx.cp.shard(dwhole, ctx.dim) if same else ctx.cp._summed_shard(dwhole, ctx.dim, *ctx.numbers)
        return found, None, None, None, None, None


def _check_dim(tensor: object, dim: int, of: str) -> None:
    """Raises ValueError unless a tensor has the dimension of its tokens."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"tensor is {type(tensor).__name__}; pass a torch tensor of {of}")
    if not hasattr(dim, "__index__") or not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"dim {dim} is none of the {tensor.ndim} dimensions of the tensor; give that of its tokens")


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
