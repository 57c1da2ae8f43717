"""Bytes that a rank sends and holds to receive, before there are tensors, and the least that nodes must send.

Communication volume is counted from the plans that the engine runs: `Traffic` counts the same number while they run, to
the byte. The choice of the backward side rests on these counts. Integer code.

**Receive slots.** By copy engine peers copy into slots of memory that torch's allocator does not manage
(`engine.attention.comm.symm_mem`). They grow to the largest message, at the first calls, and stay.

**Between nodes** (`least_inter_node_bytes`). Of what a schedule leaves open the count takes what sends least: either
side in backward, chunks forwarded or sent directly, gradients in the inputs' dtype, head chunks without padding, and
tensors saved in forward not sent again. Counted is the node that sends most. Its ranks share the node's links, and a
ring of all ranks lets one of them send for all, so a node is what a link's speed can be held against. From this follows
a bound of a step's time that holds by construction:

    step >= needed / link,  needed = least bytes of the schedule that sends fewest,  link = the fastest speed seen

where `link` is no less than what the step itself sent between nodes divided by its seconds. A step under schedule r
sends `sent` bytes from its fullest node, and needed <= least(r) <= sent: the first because `needed` is a minimum over
all schedules of the engine, which its baselines run too, the second because a plan sends no less than the plan with
every open choice at its least. So needed / link <= needed / (sent / step) <= step. Compute costs nothing in it and
overlaps with every transfer; transfers inside a node are free. The steps are those of attention alone, without
recomputation in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from engine.attention.comm_plan import CommPlan, chunks_held, comm_plan, length, ring_tables
from engine.attention.geometry.layout import Layout, Ring
from engine.attention.geometry.tiles import Integers
from engine.attention.masks import Mask
from engine.attention.problem import (
    BACKWARD_SIDES,
    RING_SCHEDULES,
    ULYSSES_SCHEDULES,
    Division,
    Problem,
    divided,
    schedule_unsupported_reason,
)

CHUNK_SLOTS = 2  # one chunk is used while the next arrives
HELD_GRADIENTS = 2  # received gradients that may wait in their slots, to be summed together, while the next is awaited
GRADIENT_SLOTS = HELD_GRADIENTS + 1
HEAD_SLOTS = 2  # in each direction: one head chunk is used while the next arrives
# Up to so many ranks all nodes are counted; of more ranks, three nodes: the fullest of those is no fuller than the
# fullest of all, so what is needed comes out no larger.
ALL_COUNTED = 32


@dataclass(frozen=True, slots=True)
class SentBytes:
    """Bytes a rank sends."""

    near: int = 0  # to ranks of its node
    far: int = 0  # to other nodes

    @property
    def total(self) -> int:
        return self.near + self.far

    def __add__(self, other: SentBytes) -> SentBytes:
        return SentBytes(self.near + other.near, self.far + other.far)

    def times(self, count: int) -> SentBytes:
        return SentBytes(self.near * count, self.far * count)


@dataclass(frozen=True, slots=True)
class CallBytes:
    """Bytes a rank sends in one call."""

    forward: SentBytes = field(default_factory=SentBytes)
    backward: SentBytes = field(default_factory=SentBytes)

    @property
    def total(self) -> int:
        return self.forward.total + self.backward.total

    def __add__(self, other: CallBytes) -> CallBytes:
        return CallBytes(self.forward + other.forward, self.backward + other.backward)

    def times(self, count: int) -> CallBytes:
        return CallBytes(self.forward.times(count), self.backward.times(count))


@dataclass(frozen=True, slots=True)
class GradientWidths:
    """Bytes per element of a gradient that crosses a link."""

    unreduced: int  # as the kernel wrote it
    summed: int

    def of(self, unreduced: bool) -> int:
        return self.unreduced if unreduced else self.summed


class NarrowedGradients(NamedTuple):
    """Where gradients are sent in the inputs' dtype; elsewhere sums are sent in fp32 or wider."""

    first_ring: bool  # inside a node, of the node's own chunks: the only inner ring of a flat ring
    later_rings: bool  # inside a node, of the chunks of other nodes
    across: bool  # between nodes

    def at_slowest(self, nodes: int) -> bool:
        """At the slowest links that gradients cross among ranks of so many nodes."""
        return self.across if nodes > 1 else self.first_ring


def narrowed(grad_comm_dtype: str) -> NarrowedGradients:
    """What the setting means."""
    everywhere, after = grad_comm_dtype == "input", grad_comm_dtype == "input_after_first"
    return NarrowedGradients(everywhere, everywhere or after, grad_comm_dtype != "fp32")


def gradient_widths(narrow: Sequence[bool], item: int, written: int) -> tuple[GradientWidths, ...]:
    """One per field of `NarrowedGradients`: inputs have `item` bytes, kernels write `written` of their gradients."""
    return tuple(GradientWidths(item, item) if each else GradientWidths(written, max(4, item)) for each in narrow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Shape and widths of one rank's shards. Counts of bytes are of one token, over the batch."""

    batch: int
    tokens: int  # local ones
    heads: int
    kv_heads: int
    head_dim: int  # of Q and K
    input_bytes: int  # per element of Q, K, V and dO
    intra_node: GradientWidths  # of gradients inside a node
    inter_node: GradientWidths  # and between nodes
    later_rings: GradientWidths | None = None  # inside a node, of the chunks of other nodes; as `intra_node` when None
    value_dim: int = 0  # of V and O; 0: as `head_dim`
    latent_dims: int = 0  # of a latent and a shared key, which are sent in place of K and V; 0: there is none

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)

    @classmethod
    def of(cls, problem: Problem, widths: Sequence[GradientWidths], *, shared_by: int = 1, chunks: int = 1) -> Shards:
        """Those of one head chunk on a rank that divides the heads among `shared_by` ranks and holds their tokens, at
        least one head of each kind; `widths` as from `gradient_widths`."""
        first, later, across = widths
        return cls(
            batch=problem.batch,
            tokens=problem.seq_len // problem.cp_size * shared_by,
            heads=max(1, problem.heads // shared_by // chunks),
            kv_heads=max(1, problem.kv_heads // shared_by // chunks),
            head_dim=problem.head_dim,
            input_bytes=problem.input_bytes,
            intra_node=first,
            inter_node=across,
            later_rings=later,
            value_dim=problem.value_dim,
            latent_dims=problem.latent_dim + problem.shared_key_dim,
        )

    def inside(self, outer_step: int) -> GradientWidths:
        """Of gradients inside a node, in the inner ring of that outer step."""
        return self.later_rings if outer_step and self.later_rings is not None else self.intra_node

    @property
    def query(self) -> int:
        """Of Q, and so of the dQ that are returned."""
        return self.batch * self.heads * self.head_dim * self.input_bytes

    @property
    def output(self) -> int:
        """Of O, and so of dO."""
        return self.batch * self.heads * self.value_dim * self.input_bytes

    @property
    def key_side(self) -> int:
        """Of K and V, or of the latent and the shared key that they are formed from; so of the gradients returned."""
        dims = self.latent_dims or self.kv_heads * (self.head_dim + self.value_dim)
        return self.batch * dims * self.input_bytes

    @property
    def exchanged_key_gradient(self) -> int:
        """Of the gradients of the key side that an all-to-all returns: of a latent as sums, which are added."""
        return self.gradient(False, self.row_bytes if self.latent_dims else self.input_bytes)

    @property
    def row(self) -> int:
        """Of LSE, and of delta: fp32, float64 for float64 inputs."""
        return self.batch * self.heads * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return max(4, self.input_bytes)

    def sent_side(self, sends_queries: bool) -> int:
        """Of the side that is sent in backward: Q, dO, LSE and delta, or K and V."""
        return self.query + self.output + 2 * self.row if sends_queries else self.key_side

    def gradient(self, sends_queries: bool, element_bytes: int) -> int:
        """Of the gradients that are returned: dQ, or dK and dV."""
        return (self.query if sends_queries else self.key_side) // self.input_bytes * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RingVolume:
    """Counts the bytes of a ring: its order, and the exchange pattern inside a node."""

    ring: Ring
    node_size: int  # consecutive ranks that share a node: on a flat ring perhaps fewer than its ranks
    exchange: str  # relay, direct or copy_engine

    def chunks(self, work: CommPlan, cp_rank: int, tokens: int, token_bytes: int) -> SentBytes:
        """Bytes of chunks that `cp_rank` sends, its own and those it forwards; `tokens` are those of a shard."""
        tables, ring = work.tables, self.ring
        outer_steps, own = chunks_held(ring, cp_rank)
        workers = self._of_node(cp_rank)
        counts = np.zeros(ring.cp_size, dtype=np.int64)  # tokens by the rank that they are sent to
        if self.exchange == "relay":
            ranges = tables.needed[self._of_node(own[:, None]), outer_steps[:, None]]
            lengths = ranges[..., 1] - ranges[..., 0]
            lengths[0] = tokens  # nothing is cut off before the first inner ring
            # Every chunk is passed on but that of the next rank, which arrives last.
            after = workers[(cp_rank + 1) % ring.node_size]
            counts[after] = lengths[:, workers != after].sum()
        else:
            ranges = tables.used[own[:, None], workers]
            counts[workers] = (ranges[..., 1] - ranges[..., 0]).sum(axis=0)
            counts[cp_rank] = 0
        counts[(cp_rank + ring.node_size) % ring.cp_size] += sum(map(length, work.leaving))
        return self._counted(cp_rank, counts * token_bytes)

    def gradients(self, work: CommPlan, cp_rank: int, shards: Shards, sends_queries: bool) -> SentBytes:
        """Bytes of gradients that `cp_rank` sends to the ranks that own the chunks."""
        tables, ring = work.tables, self.ring
        outer_steps, own = chunks_held(ring, cp_rank)
        workers = self._of_node(cp_rank)
        nbytes = np.zeros(ring.cp_size, dtype=np.int64)  # per element of a token, by the rank that they are sent to
        widths = [shards.inside(int(step)) for step in outer_steps]
        summed = np.array([each.summed for each in widths])
        if self.exchange == "relay":
            after = workers[(cp_rank + 1) % ring.node_size]
            nbytes[after] = (len(workers) - 1) * shards.tokens * summed.sum()
        else:
            owners = self._of_node(own[:, None])
            ranges, unreduced = tables.used[owners, cp_rank], tables.unreduced[owners, cp_rank]
            width = np.where(unreduced, np.array([each.unreduced for each in widths])[:, None], summed[:, None])
            nbytes[workers] = ((ranges[..., 1] - ranges[..., 0]) * width).sum(axis=0)
            nbytes[cp_rank] = 0
        given = list(zip(own.tolist(), work.given, work.given_unreduced, strict=True))
        for owner, tokens, as_written in given[1:]:  # the first are of this rank's own chunk, and stay
            nbytes[owner] += length(tokens) * shards.inter_node.of(as_written)
        return self._counted(cp_rank, nbytes * shards.gradient(sends_queries, 1))

    def _of_node(self, cp_ranks: int | Integers) -> Integers:
        """The ranks of a rank's inner ring, in the last dimension."""
        size = self.ring.node_size
        return cp_ranks // size * size + np.arange(size)

    def backward(self, work: CommPlan, cp_rank: int, shards: Shards, sends_queries: bool) -> SentBytes:
        """Bytes that `cp_rank` sends in backward with one side, chunks and gradients; `work` is that side's plan."""
        out = self.chunks(work, cp_rank, shards.tokens, shards.sent_side(sends_queries))
        return out + self.gradients(work, cp_rank, shards, sends_queries)

    def rank_bytes(
        self, problem: Problem, division: Division, cp_rank: int, shards: Shards, sends_queries: bool
    ) -> CallBytes:
        """Bytes that CP rank `cp_rank` sends along its ring in forward, which sends keys, and in backward, which sends
        one side."""
        rank = division.ring_rank(cp_rank)
        forward, backward = (
            comm_plan(problem.mask, division.layout, self.ring, problem.seq_len, rank, queries)
            for queries in (False, sends_queries)
        )
        return CallBytes(
            self.chunks(forward, rank, shards.tokens, shards.key_side),
            self.backward(backward, rank, shards, sends_queries),
        )

    def _counted(self, cp_rank: int, nbytes: Integers) -> SentBytes:
        """Bytes by the rank that they are sent to, as those of this node and of others."""
        node, total = cp_rank // self.node_size, int(nbytes.sum())
        near = int(nbytes[node * self.node_size : (node + 1) * self.node_size].sum())
        return SentBytes(near, total - near)


def all_to_all_bytes(
    members: tuple[int, ...], cp_rank: int, node_size: int, part: Shards, *, gathered: bool, packed: bool
) -> CallBytes:
    """Bytes that `cp_rank` sends for one chunk of its heads; `part` are the shards of that chunk.

    Args:
        members: CP ranks of the all-to-all, `cp_rank` among them.
        gathered: backward reads what forward received; else Q, K, V and LSE are sent again.
        packed: all tensors for a rank are one message, rounded up to a multiple of its widest dtype.
    """
    tokens = part.tokens // len(members)
    query, output, keys, row = (tokens * each for each in (part.query, part.output, part.key_side, part.row))

    def message(nbytes: int, widest: int) -> int:
        return -(-nbytes // widest) * widest if packed else nbytes

    inputs, keys_back = query + keys, tokens * part.exchanged_key_gradient
    gradients = message(query + keys_back, part.row_bytes if part.latent_dims else part.input_bytes)
    forward = message(inputs, part.input_bytes) + message(output + row, part.row_bytes)
    backward = message(output + row if gathered else inputs + output + 2 * row, part.row_bytes) + gradients
    near = sum(rank // node_size == cp_rank // node_size for rank in members) - 1
    far = len(members) - 1 - near
    return CallBytes(SentBytes(near * forward, far * forward), SentBytes(near * backward, far * backward))


def gather_bytes(cp_size: int, node_size: int, shards: Shards) -> CallBytes:
    """Bytes that a rank sends when K and V are gathered, again in backward, and their gradients reduced to the owners.

    Counted as sent to each rank by the owner itself; how a collective routes them is the library's choice.
    """
    near, far = node_size - 1, cp_size - node_size
    keys = shards.key_side * shards.tokens
    summed = shards.intra_node.summed if far == 0 else shards.inter_node.summed
    backward = keys + shards.gradient(False, summed) * shards.tokens
    return CallBytes(SentBytes(near * keys, far * keys), SentBytes(near * backward, far * backward))


def head_slot_bytes(part: Shards, recompute: bool) -> int:
    """Receive slots of an all-to-all of head chunks like `part`: q, k and v arrive, results return; backward sends
    again what it has not saved, with dout and rows of LSE and delta."""
    tokens = part.tokens
    inputs, output, row = (each * tokens for each in (part.query + part.key_side, part.output, part.row))
    gradients = (part.query + part.exchanged_key_gradient) * tokens
    outbound = inputs + output + 2 * row if recompute else max(inputs, output + row)
    return HEAD_SLOTS * (outbound + max(gradients, output + row))


def ring_slot_bytes(mask: Mask, layout: Layout, ring: Ring, seq_len: int, shards: Shards, sends_queries: bool) -> int:
    """Receive slots of inner rings: forward receives keys and values, backward the side that is sent, and its
    gradients. Those of the fullest rank."""
    keys, _ = ring_tables(mask, layout, ring, seq_len, False).in_nodes
    sent, unreduced = ring_tables(mask, layout, ring, seq_len, sends_queries).in_nodes
    chunk = max(shards.key_side * max(map(max, keys)), shards.sent_side(sends_queries) * max(map(max, sent)))
    gradient = 0
    for here, there in itertools.product(range(ring.nodes), repeat=2):  # nodes that compute, and that own the chunk
        width = shards.inside((here - there) % ring.nodes).of(unreduced[here][there])
        gradient = max(gradient, sent[here][there] * shards.gradient(sends_queries, width))
    return CHUNK_SLOTS * chunk + GRADIENT_SLOTS * gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class InterNodeBytes:
    """Bytes that leave the node that sends most, in one forward and its backward."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@lru_cache(maxsize=1024)
def least_inter_node_bytes(problem: Problem) -> dict[str, InterNodeBytes]:
    """The least that each schedule able to run the problem sends between nodes, by schedule, fewest bytes first."""
    found = {}
    for schedule in RING_SCHEDULES + ULYSSES_SCHEDULES:
        if schedule_unsupported_reason(schedule, problem, problem.layout.name) is None:
            found[schedule] = min(map(_fullest, _bytes_of_nodes(schedule, problem)), key=lambda each: each.total)
    return dict(sorted(found.items(), key=lambda pair: pair[1].total))


def _fullest(nodes: Sequence[CallBytes]) -> InterNodeBytes:
    """Of the counted nodes, the one that sends most to others."""
    fullest = max(nodes, key=lambda node: node.forward.far + node.backward.far)
    return InterNodeBytes(forward=fullest.forward.far, backward=fullest.backward.far)


def _bytes_of_nodes(schedule: str, problem: Problem) -> Iterator[list[CallBytes]]:
    """Bytes of each counted node, for everything that a schedule leaves open between nodes."""
    last = problem.nodes - 1
    nodes = range(problem.nodes) if problem.cp_size <= ALL_COUNTED else (0, problem.nodes // 2, last)
    ranks_of = [range(node * problem.node_size, (node + 1) * problem.node_size) for node in nodes]
    division = divided(schedule, problem.layout, problem.cp_size, problem.node_size)
    narrow = GradientWidths(unreduced=problem.input_bytes, summed=problem.input_bytes)
    part = Shards.of(problem, (narrow,) * 3, shared_by=division.shared_by)
    if schedule in ("ulysses", "usp_transposed"):
        yield [_sum(_exchanged(division, problem, part, rank) for rank in ranks) for ranks in ranks_of]
        return
    # Inside a node an exchange pattern changes no byte between nodes: only a ring of all ranks has the choice.
    for side, exchange in itertools.product(BACKWARD_SIDES, ("relay", "direct") if schedule == "ring" else ("relay",)):
        volume = RingVolume(ring=division.ring, node_size=division.node_size, exchange=exchange)
        yield [
            _sum(volume.rank_bytes(problem, division, rank, part, side == "query") for rank in ranks)
            for ranks in ranks_of
        ]


def _exchanged(division: Division, problem: Problem, part: Shards, cp_rank: int) -> CallBytes:
    return all_to_all_bytes(division.members(cp_rank), cp_rank, problem.node_size, part, gathered=True, packed=False)


def _sum(calls: Iterable[CallBytes]) -> CallBytes:
    return sum(calls, CallBytes())
