"""One pass around a ring, forward and backward: what BurstAttention and RingAttention do once every choice is made.

Forward, keys and values travel the ring and every rank folds what it sees into its own queries' output. Backward,
either side can travel:

- `query` (BurstAttention, arXiv:2403.09347): Q, dO, delta and LSE travel, dQ follows them, dK and dV accumulate at
  home. O stays at home: delta = rowsum(dO * O) says all the backward needs of it.
- `key_value` (RingAttention, arXiv:2310.01889): K and V travel, dK and dV follow them, dQ accumulates at home.

Across nodes a double ring (arXiv:2403.09347, section 3.3) moves shards: a transfer to the next node starts with a lap
inside the node and has all of it to finish. Gradients are summed inside the node that computed them and cross once.

This file only composes ring order, layout, mask, kernel and exchange; each is a value of its own.
Shape letters: B batch, S whole sequence, L this rank's tokens, N query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from engine.attention.accumulate.gradients import GradAccumulator
from engine.attention.accumulate.output import OutputAccumulator, accumulation_dtype
from engine.attention.accumulate.tensor_spec import tensor_specs
from engine.attention.comm.exchange import ChunkSpec, InterNodeGradReduce, RemoteChunk
from engine.attention.comm.link_speed import Link
from engine.attention.context import ContextParallel
from engine.attention.geometry.ring import Ring
from engine.attention.kernels import BackwardInputs, Kernel
from engine.attention.masks import Mask, imbalance, recompute_share
from engine.attention.masks.first_rows import FirstRows
from engine.attention.planning.comm_plan import CommPlan, comm_plan, reach
from engine.attention.planning.comm_volume import Circle, PassBytes, Shards, cheaper_backward, narrowed
from engine.attention.planning.cost_model import Estimate, HardwareModel

KEY_SIDE_DIMS = (1, 1)  # token dimension of K_BLKD, V_BLKD
QUERY_SIDE_DIMS = (1, 1, 2, 2)  # of Q_BLND, dO_BLND, LSE_BNL, delta_BNL


@dataclass(frozen=True, slots=True)
class RingStep:
    """One stop of the ring: whose shard is here, as much of it as is needed, at which step of which lap."""

    owner: int
    outer_step: int
    step: int
    visit: RemoteChunk


@dataclass(frozen=True, kw_only=True)
class RingPlan:
    """Everything about one pass around a ring but its tensors."""

    cp: ContextParallel
    mask: Mask
    ring: Ring
    exchange: str  # relay, direct or copy_engine
    kernel: Kernel
    backward_side: str  # side that backward_side in backward: query or key_value
    seq_len: int
    shards: Shards  # of this rank
    scale: float
    deterministic: bool
    grad_comm_dtype: str  # what sums of gradients cross links in: fp32, or the inputs' dtype: `input_across`, `input`
    estimate: Estimate | None = None  # what led to the schedule, when a cost model chose it
    link: Link | None = None  # between nodes, when a choice rests on its speed
    cut: int | None = None  # global position that the computed rows lie before; None: all rows are computed

    def comm_plan(self, sends_queries: bool) -> CommPlan:
        """What this rank does when the query side backward_side, or the key side."""
        return comm_plan(self.mask, self.cp.layout, self.ring, self.seq_len, self.cp.rank, sends_queries)

    @property
    def circle(self) -> Circle:
        """The ring as bytes travel it."""
        return Circle(ring=self.ring, node_size=self.cp.node_size, exchange=self.exchange)

    def sent_bytes(self, *, kept: bool = True) -> PassBytes:
        """What this rank sends in a whole forward and its backward. A ring keeps its shards either way."""
        assert self.cut is None, "the forward of some rows has no backward"
        rank, circle, shards = self.cp.rank, self.circle, self.shards
        sends_queries = self.backward_side == "query"
        forward, backward = self.comm_plan(sends_queries=False), self.comm_plan(sends_queries)
        return PassBytes(
            circle.outward(forward, rank, shards.tokens, 2 * shards.key),
            circle.backward(backward, rank, shards, sends_queries),
        )

    def by_cheaper_route(self, hardware: HardwareModel) -> RingPlan:
        """This plan with the route in backward whose bytes take less time: the same one on every rank."""
        route = cheaper_backward(self.mask, self.cp.layout, self.circle, self.seq_len, self.shards, hardware)
        return replace(self, backward_side=route)

    def circulate(
        self, shard: tuple[Tensor, ...], token_dims: tuple[int, ...], sends_queries: bool
    ) -> Iterator[RingStep]:
        """Meet every rank's shard, own first; what comes next backward_side while this one is used."""
        ring, cp, work = self.ring, self.cp, self.comm_plan(sends_queries)
        routes = cp.routes(ring, self.exchange)
        node, slot = divmod(cp.rank, ring.node_size)
        held, cargo = RemoteChunk(shard), ChunkSpec(tensor_specs(shard), token_dims)
        for outer_step in range(ring.nodes):
            crossing, coming = None, (0, 0)
            if outer_step + 1 < ring.nodes:
                assert routes.across is not None
                to, source = (node + 1) % ring.nodes, (node - 1) % ring.nodes
                next_held = work.inner_rings[outer_step + 1].held
                assert next_held is not None
                coming = next_held[slot]
                leaving = held.cut(work.leaving[outer_step], token_dims)
                crossing = routes.across.start(leaving, to, cargo.like(coming), source)
            # No name here holds a visit: its memory is free before the next transfer but one wants some.
            meet = partial(self._meeting, outer_step)
            yield from map(meet, routes.inside.inner_ring(held, cargo, work.inner_rings[outer_step]), itertools.count())
            if crossing is not None:
                held = RemoteChunk(crossing.wait(), coming[0])

    def _meeting(self, outer_step: int, visit: RemoteChunk, step: int) -> RingStep:
        return RingStep(self.ring.owner(self.cp.rank, outer_step * self.ring.node_size + step), outer_step, step, visit)

    def forward(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """(out_BLND, lse_BNL) of this rank's queries over the whole sequence."""
        return _ring_forward(self, q_BLND, k_BLKD, v_BLKD)

    def before(self, cut: int) -> RingPlan:
        """The forward of the queries before global position `cut` alone: this rank's first rows.

        Only keys that they see travel. Its tensors may be those of the whole shard or no more than it needs of them.
        """
        return replace(self, mask=FirstRows(self.mask, cut), cut=cut)

    def recompute_share(self, cut: int) -> float:
        """Work of the busiest rank in the forward of `before(cut)`, over a rank's mean work in its own."""
        return recompute_share(self.mask, self.cp.layout, self.seq_len, self.cp.size, cut)

    def backward(
        self,
        q_BLND: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        dout_BLND: Tensor,
        lse_BNL: Tensor,
        delta_BNL: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq_BLND, dk_BLKD, dv_BLKD) of this rank's shards, in the inputs' dtype."""
        return _ring_backward(self, q_BLND, k_BLKD, v_BLKD, dout_BLND, lse_BNL, delta_BNL)

    def forward_keeping(
        self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """`forward`, and what `backward_kept` wants."""
        return *self.forward(q_BLND, k_BLKD, v_BLKD), (q_BLND, k_BLKD, v_BLKD)

    def backward_kept(
        self, kept: tuple[Tensor, ...], dout_BLND: Tensor, lse_BNL: Tensor, delta_BNL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`backward` of what `forward_keeping` kept."""
        q_BLND, k_BLKD, v_BLKD = kept
        return self.backward(q_BLND, k_BLKD, v_BLKD, dout_BLND, lse_BNL, delta_BNL)

    def resolved(self) -> dict[str, str]:
        """What was decided, for the record."""
        estimated = {"estimate": str(self.estimate)} if self.estimate else {}
        if self.link is not None:
            estimated["link"] = str(self.link)
        return estimated | {
            "kernel": self.kernel.name,
            "layout": self.cp.layout.name,
            "schedule": "ring" if self.ring.nodes == 1 else "double_ring",
            "backward": self.backward_side,
            "exchange": self.exchange if self.cp.size > 1 else "none",
            "mask": str(self.mask),
            "imbalance": f"{imbalance(self.mask, self.cp.layout, self.seq_len, self.cp.size):.4f}",
        }


def _ring_forward(plan: RingPlan, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
    if plan.cut is not None:
        # What is handed on around a circle is handed on whole: keys that nobody needs are left out before.
        needed = reach(plan.mask, plan.cp.layout, plan.cp.size, plan.seq_len)
        q_BLND = q_BLND[:, : plan.cp.rows_before(plan.cut, plan.seq_len)]
        k_BLKD, v_BLKD = k_BLKD[:, :needed], v_BLKD[:, :needed]
    running, work = OutputAccumulator(q_BLND), plan.comm_plan(sends_queries=False)
    for stop in plan.circulate((k_BLKD, v_BLKD), KEY_SIDE_DIMS, sends_queries=False):
        for tile in work.tiles[stop.owner]:
            keys = tile.shifted(0, -stop.visit.start).k
            k_hop, v_hop = (tensor[:, keys] for tensor in stop.visit.tensors)
            running.fold(tile.q, *plan.kernel.forward(q_BLND[:, tile.q], k_hop, v_hop, tile.band, plan.scale))
            del k_hop, v_hop
        del stop
    return running.result()


def _ring_backward(
    plan: RingPlan,
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor,
    dout_BLND: Tensor,
    lse_BNL: Tensor,
    delta_BNL: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_BLND, dk_BLKD, dv_BLKD) of this rank's shards, in the inputs' dtype."""
    sends_queries = plan.backward_side == "query"
    query_side, key_side = (q_BLND, dout_BLND, lse_BNL, delta_BNL), (k_BLKD, v_BLKD)
    part_dtype = q_BLND.dtype if plan.kernel.writes_input_dtype else accumulation_dtype(q_BLND.dtype)
    wire, wire_across = (q_BLND.dtype if narrow else None for narrow in narrowed(plan.grad_comm_dtype))
    routes, work = plan.cp.routes(plan.ring, plan.exchange), plan.comm_plan(sends_queries)
    at_home = tuple(GradAccumulator(t, part_dtype) for t in (key_side if sends_queries else (q_BLND,)))
    home = InterNodeGradReduce(plan.ring, plan.cp.rank, routes.gradients_across, wire_across, work)

    travelling, dims = (query_side, QUERY_SIDE_DIMS) if sends_queries else (key_side, KEY_SIDE_DIMS)
    for stop in plan.circulate(travelling, dims, sends_queries):
        visiting = tuple(GradAccumulator(t, part_dtype) for t in ((q_BLND,) if sends_queries else key_side))
        dq, (dk, dv) = (visiting[0], at_home) if sends_queries else (at_home[0], visiting)
        for tile in work.tiles[stop.owner]:
            met = (*stop.visit.tensors, *key_side) if sends_queries else (*query_side, *stop.visit.tensors)
            local = tile.shifted(*((-stop.visit.start, 0) if sends_queries else (0, -stop.visit.start)))
            dq_part, dk_part, dv_part = plan.kernel.backward(
                BackwardInputs(*met).tokens(local.q, local.k), tile.band, plan.scale, plan.deterministic
            )
            dq.add(tile.q, dq_part)
            dk.add(tile.k, dk_part)
            dv.add(tile.k, dv_part)
            del met, dq_part, dk_part, dv_part
        if stop.step == 0:
            inside = routes.inside.homecoming(wire, work.inner_rings[stop.outer_step])
        inside.add(stop.step, visiting)
        if stop.step + 1 == plan.ring.node_size:
            home.add(stop.outer_step, inside.finish())
        del stop
    sums = (*home.finish(), *at_home) if sends_queries else (*at_home, *home.finish())
    dq_BLND, dk_BLKD, dv_BLKD = (gradient.final(q_BLND.dtype) for gradient in sums)
    return dq_BLND, dk_BLKD, dv_BLKD
