"""How many bytes a rank will send, before there are tensors: forward, and backward with either side. Integer code.

Communication volume, counted from the same communication plans that `engine.attention.algorithms` runs: `Traffic`
counts the same number while it runs, to the byte. The choice of the backward side rests on these counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.attention.geometry.layout import Layout
from engine.attention.geometry.ring import Ring
from engine.attention.geometry.tile_table import Integers
from engine.attention.masks import Mask
from engine.attention.planning.comm_plan import CommPlan, chunks_held, comm_plan, length
from engine.attention.planning.cost_model import BACKWARD_SIDES, GIB, HardwareModel

if TYPE_CHECKING:  # reports count bytes too, and start without torch
    from engine.attention.kernels import Kernel, KernelProblem

GRAD_COMM_DTYPES = ("fp32", "input_across", "input_after_first", "input")
ALL_RANKS = 8  # up to so many ranks are added up for a choice; of more ranks, three


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes a rank sends."""

    near: int = 0  # to ranks of its node
    far: int = 0  # to other nodes

    @property
    def total(self) -> int:
        return self.near + self.far

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.near + other.near, self.far + other.far)

    def times(self, count: int) -> Sent:
        return Sent(self.near * count, self.far * count)

    def seconds(self, hardware: HardwareModel) -> float:
        """How long the links take, near and far one after the other."""
        return self.near / (hardware.inside_gib * GIB) + self.far / (hardware.across_gib * GIB)


@dataclass(frozen=True, slots=True)
class CallBytes:
    """Bytes a rank sends in one call."""

    forward: Sent = field(default_factory=Sent)
    backward: Sent = field(default_factory=Sent)

    @property
    def total(self) -> int:
        return self.forward.total + self.backward.total


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes per element of a gradient that crosses a link."""

    unreduced: int  # as the kernel wrote it
    summed: int

    def of(self, unreduced: bool) -> int:
        return self.unreduced if unreduced else self.summed


class Narrowed(NamedTuple):
    """Where gradients are sent in the inputs' dtype; elsewhere sums are sent in fp32 or wider."""

    first_ring: bool  # inside a node, of the node's own chunks: the only inner ring of a flat ring
    later_rings: bool  # inside a node, of the chunks of other nodes
    across: bool  # between nodes


def narrowed(grad_comm_dtype: str) -> Narrowed:
    """What the setting means."""
    everywhere, after = grad_comm_dtype == "input", grad_comm_dtype == "input_after_first"
    return Narrowed(everywhere, everywhere or after, grad_comm_dtype != "fp32")


def gradient_widths(grad_comm_dtype: str, item: int, written: int) -> tuple[Widths, ...]:
    """Of gradients of inputs of `item` bytes, of which the kernel writes `written`: for each place of `Narrowed`."""
    return tuple(
        Widths(item, item) if narrow else Widths(written, max(4, item)) for narrow in narrowed(grad_comm_dtype)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Shape and widths of one rank's shards. Counts of bytes are of one token, over the batch."""

    batch: int
    tokens: int  # local ones
    heads: int
    kv_heads: int
    head_dim: int
    input_bytes: int  # per element of Q, K, V and dO
    intra_node: Widths  # of gradients inside a node
    inter_node: Widths  # and between nodes
    later_rings: Widths | None = None  # inside a node, of the chunks of other nodes; as `intra_node` when None

    @classmethod
    def of(cls, problem: KernelProblem, kernel: Kernel, batch: int, tokens: int, grad_comm_dtype: str) -> Shards:
        """Those that `kernel` works on; gradients cross links as `grad_comm_dtype` says."""
        item = problem.dtype.itemsize
        written = item if kernel.writes_input_dtype else max(4, item)
        first, later, across = gradient_widths(grad_comm_dtype, item, written)
        return cls(
            batch=batch,
            tokens=tokens,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            head_dim=problem.head_dim,
            input_bytes=item,
            intra_node=first,
            inter_node=across,
            later_rings=later,
        )

    def inside(self, outer_step: int) -> Widths:
        """Of gradients inside a node, in the inner ring of that outer step."""
        return self.later_rings if outer_step and self.later_rings is not None else self.intra_node

    @property
    def query(self) -> int:
        """Of Q, and so of O, dO and the dQ that are returned."""
        return self.batch * self.heads * self.head_dim * self.input_bytes

    @property
    def key(self) -> int:
        """Of K, and so of V and the dK and dV that are returned."""
        return self.batch * self.kv_heads * self.head_dim * self.input_bytes

    @property
    def row(self) -> int:
        """Of LSE, and of delta: fp32, float64 for float64 inputs."""
        return self.batch * self.heads * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return max(4, self.input_bytes)

    def sent_side(self, sends_queries: bool) -> int:
        """Of the side that is sent in backward: Q, dO, LSE and delta, or K and V."""
        return 2 * self.query + 2 * self.row if sends_queries else 2 * self.key

    def gradient(self, sends_queries: bool, element_bytes: int) -> int:
        """Of the gradients that are returned: dQ, or dK and dV."""
        return (self.query if sends_queries else 2 * self.key) // self.input_bytes * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RingVolume:
    """Counts the bytes of a ring: its order, and the exchange pattern inside a node."""

    ring: Ring
    node_size: int  # consecutive ranks that share a node: on a flat ring perhaps fewer than its ranks
    exchange: str  # relay, direct or copy_engine

    def chunks(self, work: CommPlan, cp_rank: int, tokens: int, token_bytes: int) -> Sent:
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

    def gradients(self, work: CommPlan, cp_rank: int, shards: Shards, sends_queries: bool) -> Sent:
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

    def backward(self, work: CommPlan, cp_rank: int, shards: Shards, sends_queries: bool) -> Sent:
        """Bytes that `cp_rank` sends in backward with one side, chunks and gradients; `work` is that side's plan."""
        out = self.chunks(work, cp_rank, shards.tokens, shards.sent_side(sends_queries))
        return out + self.gradients(work, cp_rank, shards, sends_queries)

    def call_bytes(
        self, forward: CommPlan, backward: CommPlan, cp_rank: int, shards: Shards, sends_queries: bool
    ) -> CallBytes:
        """Bytes that `cp_rank` sends in a forward, whose plan sends keys, and in the backward of one side's plan."""
        return CallBytes(
            self.chunks(forward, cp_rank, shards.tokens, 2 * shards.key),
            self.backward(backward, cp_rank, shards, sends_queries),
        )

    def _counted(self, cp_rank: int, nbytes: Integers) -> Sent:
        """Bytes by the rank that they are sent to, as those of this node and of others."""
        node, total = cp_rank // self.node_size, int(nbytes.sum())
        near = int(nbytes[node * self.node_size : (node + 1) * self.node_size].sum())
        return Sent(near, total - near)


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
    query, key, row = (tokens * token_bytes for token_bytes in (part.query, part.key, part.row))

    def message(nbytes: int, widest: int) -> int:
        return -(-nbytes // widest) * widest if packed else nbytes

    inputs, gradients = query + 2 * key, message(query + 2 * key, part.input_bytes)
    forward = message(inputs, part.input_bytes) + message(query + row, part.row_bytes)
    backward = message(query + row if gathered else inputs + query + 2 * row, part.row_bytes) + gradients
    near = sum(rank // node_size == cp_rank // node_size for rank in members) - 1
    far = len(members) - 1 - near
    return CallBytes(Sent(near * forward, far * forward), Sent(near * backward, far * backward))


def gather_bytes(cp_size: int, node_size: int, shards: Shards) -> CallBytes:
    """Bytes that a rank sends when K and V are gathered, again in backward, and their gradients reduced to the owners.

    Counted as sent to each rank by the owner itself; how a collective routes them is the library's choice.
    """
    near, far = node_size - 1, cp_size - node_size
    keys = 2 * shards.key * shards.tokens
    summed = shards.intra_node.summed if far == 0 else shards.inter_node.summed
    backward = keys + shards.gradient(False, summed) * shards.tokens
    return CallBytes(Sent(near * keys, far * keys), Sent(near * backward, far * backward))


@lru_cache(maxsize=256)
def group_backward_bytes(
    mask: Mask, layout: Layout, volume: RingVolume, seq_len: int, shards: Shards, sends_queries: bool
) -> Sent:
    """Backward bytes of all ranks of a small group, of the first, middle and last of a large one, added up.

    The same on every rank. Ranks are added up because with contiguous causal shards the first rank sends most with one
    side and the last rank with the other, and both finish at the same time.
    """
    size = volume.ring.cp_size
    total = Sent()
    for rank in range(size) if size <= ALL_RANKS else (0, size // 2, size - 1):
        work = comm_plan(mask, layout, volume.ring, seq_len, rank, sends_queries)
        total += volume.backward(work, rank, shards, sends_queries)
    return total


def cheaper_backward(
    mask: Mask, layout: Layout, volume: RingVolume, seq_len: int, shards: Shards, hardware: HardwareModel
) -> str:
    """The backward side whose bytes take less time on the links; `query` on a tie, as for a single rank."""
    seconds = {
        side: group_backward_bytes(mask, layout, volume, seq_len, shards, side == "query").seconds(hardware)
        for side in BACKWARD_SIDES
    }
    return min(BACKWARD_SIDES, key=lambda side: seconds[side])
