"""A problem of attention: its sizes, its ranks, and how each schedule divides it. Integer code, no torch.

A schedule divides a sequence in at most two steps: all-to-alls among groups of ranks give each rank some heads of the
tokens of its group, and a ring runs among the ranks of the same place in each group (`Division`). Engine, counts of
bytes, memory planner and prediction read the division here.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from engine.attention.geometry.layout import Gathered, Layout, Ring
from engine.settings import BYTES_OF, TrialSettings

if TYPE_CHECKING:  # methods are listed without numpy
    from engine.attention.masks import Mask

BACKWARD_SIDES = ("query", "key_value")
EXCHANGES = ("relay", "direct", "copy_engine")
GRAD_COMM_DTYPES = ("fp32", "input_across", "input_after_first", "input")
RING_SCHEDULES = ("ring", "double_ring")
ULYSSES_SCHEDULES = ("ulysses", "usp", "usp_transposed")
ALL_GATHER = "all_gather"
RUNS_OF_TOKENS = (*ULYSSES_SCHEDULES, ALL_GATHER)  # schedules whose shards are runs of consecutive tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsAndRanks:
    """All that decides whether a schedule can run a problem under a layout."""

    cp_size: int
    node_size: int  # consecutive context-parallel ranks of a node; divides cp_size
    heads: int
    kv_heads: int

    @property
    def nodes(self) -> int:
        return self.cp_size // self.node_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(HeadsAndRanks):
    """Attention over one sequence on ranks that are spread over nodes. The same on every rank."""

    mask: Mask
    layout: Layout
    seq_len: int  # of the whole sequence, tokens
    batch: int
    head_dim: int  # of Q and K
    input_bytes: int  # per element of Q, K and V
    value_dim: int = 0  # of V and O; 0: as `head_dim`
    # Where K and V are formed from a latent and a key that all heads share (`engine.attention.algorithms.latent`), the
    # numbers of each for a token; 0 and 0: there is none. KV heads are then as many as query heads.
    latent_dim: int = 0
    shared_key_dim: int = 0
    on_gpu: bool = True
    copies_unsupported_reason: str | None = None  # why ranks of a node cannot copy into each other's memory

    def __post_init__(self) -> None:
        for name in ("seq_len", "batch", "heads", "kv_heads", "head_dim", "cp_size", "node_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number of at least 1")
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)

    @property
    def pair_flops(self) -> float:
        """Of one visible (query, key) pair in forward, over batch and heads."""
        return 2.0 * self.batch * self.heads * (self.head_dim + self.value_dim)

    @property
    def expansion_flops(self) -> float:
        """Of the latent of one token to K and V, over batch and heads; 0 without one."""
        width = self.head_dim - self.shared_key_dim + self.value_dim
        return 2.0 * self.batch * self.heads * width * self.latent_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Which ranks share heads in an all-to-all, and the ring that runs afterwards."""

    groups: tuple[tuple[int, ...], ...]  # CP ranks of each all-to-all; single ranks where there is none
    ring: Ring  # among the ranks of one place in every group
    node_size: int  # consecutive ranks of the ring that share a node
    layout: Layout  # of the tokens that the ring's ranks hold

    @property
    def shared_by(self) -> int:
        """Ranks among which heads are divided."""
        return len(self.groups[0])

    def ring_rank(self, cp_rank: int) -> int:
        """The rank's number in its ring: that of its group."""
        return next(number for number, group in enumerate(self.groups) if cp_rank in group)

    def members(self, cp_rank: int) -> tuple[int, ...]:
        """CP ranks of the rank's all-to-all."""
        return self.groups[self.ring_rank(cp_rank)]

    def ring_ranks(self, cp_rank: int) -> tuple[int, ...]:
        """CP ranks of the rank's ring, in its order."""
        place = self.members(cp_rank).index(cp_rank)
        return tuple(group[place] for group in self.groups)


def divided(schedule: str, layout: Layout, cp_size: int, node_size: int) -> Division:
    """How a schedule divides the ranks; for all_gather, which has no ring, as for a ring of all ranks.

    Raises ValueError for an unknown schedule.
    """
    if schedule not in RING_SCHEDULES + RUNS_OF_TOKENS:
        known = ", ".join((*RING_SCHEDULES, ALL_GATHER, *ULYSSES_SCHEDULES))
        raise ValueError(f"schedule {schedule!r} is unknown; choose one of {known}")
    ranks = range(cp_size)
    nodes = tuple(tuple(ranks[first : first + node_size]) for first in range(0, cp_size, node_size))
    columns = tuple(tuple(ranks[local::node_size]) for local in range(node_size))
    # Ranks of each all-to-all; of the ring those of one of its inner rings, and those that share a node.
    groups, inner, near = {
        "ulysses": ((tuple(ranks),), 1, 1),
        "usp": (nodes, 1, 1),
        "usp_transposed": (columns, node_size, node_size),
        "double_ring": (tuple(zip(ranks, strict=True)), node_size, node_size),
    }.get(schedule, (tuple(zip(ranks, strict=True)), cp_size, node_size))
    return Division(
        groups=groups,
        ring=Ring(cp_size=len(groups), node_size=inner),
        node_size=near,
        layout=Gathered(layout, groups) if len(groups) < cp_size else layout,
    )


def schedule_unsupported_reason(schedule: str, problem: HeadsAndRanks, layout: str) -> str | None:
    """One sentence why a schedule cannot run this problem under the layout of this name, or None."""
    if schedule not in RING_SCHEDULES + RUNS_OF_TOKENS:
        known = ", ".join(("auto", *RING_SCHEDULES, ALL_GATHER, *ULYSSES_SCHEDULES))
        return f"schedule {schedule!r} is unknown; choose one of {known}"
    if schedule in RING_SCHEDULES:
        return None
    ranks = 1 if schedule == ALL_GATHER else all_to_all_ranks(schedule, problem)
    for label, heads in (("query", problem.heads), ("KV", problem.kv_heads)):
        if heads % ranks:
            return (
                f"schedule {schedule} divides {label} heads among {ranks} ranks and {heads} do not divide by that; "
                "choose schedule ring or double_ring"
            )
    if layout == "striped" and problem.cp_size > 1:
        return (
            f"schedule {schedule} needs runs of consecutive tokens, found layout striped; choose zigzag or contiguous"
        )
    return None


def all_to_all_ranks(schedule: str, problem: HeadsAndRanks) -> int:
    """Ranks of the all-to-all of a Ulysses schedule, among which heads are divided."""
    return {"ulysses": problem.cp_size, "usp": problem.node_size, "usp_transposed": problem.nodes}[schedule]


def problem_of_trial(settings: TrialSettings, layout: Layout, node_size: int, mask: str | None = None) -> Problem:
    """One layer's attention of a trial on GPUs that can copy into each other's memory inside a node, as a rank has it:
    with its share of the heads under tensor parallelism. `mask`: one of `settings.masks`, the first by default. Raises
    ValueError for a mask that does not exist."""
    from engine.attention.masks import parse_mask

    shape = settings.model
    return Problem(
        mask=parse_mask(mask or settings.masks[0]),
        layout=layout,
        seq_len=settings.row_tokens,
        batch=1 if settings.packs else settings.batch_size,
        heads=max(1, shape.heads // settings.tp_size),
        kv_heads=max(1, shape.kv_heads // settings.tp_size),
        head_dim=shape.head_dim,
        input_bytes=BYTES_OF[settings.dtype],
        value_dim=shape.output_dim,
        latent_dim=shape.kv_latent,
        shared_key_dim=shape.rope_dim,
        cp_size=settings.cp_size,
        node_size=node_size,
    )


def host_name() -> str:
    """Name of this rank's node: NCCL_HOSTID, with which NCCL emulates nodes, or else the host's name."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


def ranks_by_node(hosts: Sequence[str]) -> list[int]:
    """Lengths of the runs of consecutive ranks on one host, in rank order."""
    return [len(list(run)) for _, run in groupby(hosts)]


def node_size_of(hosts: Sequence[str]) -> int | None:
    """Consecutive ranks per node when every node has equally many, else None. `hosts` are all ranks' in rank order."""
    runs = ranks_by_node(hosts)
    return runs[0] if len(set(runs)) == 1 and len(runs) == len(set(hosts)) else None


def shared_node_size(hosts: Sequence[str]) -> int:
    """Most consecutive ranks that always share a host when all ranks are cut into equal runs of so many.

    On equal nodes that is a node. Where one host has more ranks than another, or ranks alternate between hosts, it is
    less: one node never spans two hosts, whose GPUs cannot address each other's memory.
    """
    return math.gcd(*ranks_by_node(hosts))
