"""Ring attention, forward and backward: BurstAttention and RingAttention once every choice is made.

Forward, the chunks of K and V move around the ring, and every rank merges attention over each of them into the output
of its own queries. Backward, either side can be sent (setting `backward`):

- `query` (BurstAttention, arXiv:2403.09347, algorithm 2): Q, dO, delta and LSE are sent and dQ is returned to its
  owner; dK and dV accumulate where K and V are. O is never sent: delta = rowsum(dO * O) holds all that backward needs
  of it.
- `key_value` (RingAttention, arXiv:2310.01889): K and V are sent, dK and dV are returned, dQ accumulates locally.

A double ring (arXiv:2403.09347, section 3.3) starts to send a chunk to the next node when an inner ring starts. The
transfer may take as long as that whole ring. Gradients are summed inside the node that computed them and
cross between nodes once.

This file composes ring order, layout, mask, kernel and exchange pattern; each is a value of its own.
Shape letters: B batch, S whole sequence, L this rank's tokens, N query heads, K KV heads, D head dim (of V and O their
own).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from engine.attention.accumulate.accumulators import GradAccumulator, OutputAccumulator
from engine.attention.algorithms.latent import ExpandedChunk, Expansion
from engine.attention.algorithms.saved import AttentionPlan, Saved
from engine.attention.comm.exchange import ChunkSpec, InterNodeGradReduce, RemoteChunk, RingComms
from engine.attention.comm_plan import CommPlan, RingStep, comm_plan, reach
from engine.attention.geometry.tiles import Visible
from engine.attention.kernels import BackwardInputs
from engine.cuda.alternate import ONE_STREAM, StreamPass, Streams
from engine.ops.autograd import accumulation_dtype

KEY_SIDE_DIMS = (1, 1)  # token dimension of K_BLKD, V_BLKD
QUERY_SIDE_DIMS = (1, 1, 2, 2)  # of Q_BLND, dO_BLND, LSE_BNL, delta_BNL


@dataclass(frozen=True, kw_only=True)
class RingPlan(AttentionPlan):
    """Everything about ring attention but its tensors. For the first rows alone (`cut`), only keys that they see are
    sent, and the tensors may be no more than those rows need."""

    comms: RingComms
    streams: Streams = ONE_STREAM  # that the steps of a forward use in turn

    def forward(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, save: bool) -> tuple[Tensor, Tensor, Saved]:
        return *_ring_forward(self, q_BLND, k_BLKD, v_BLKD), Saved((q_BLND, k_BLKD, v_BLKD))

    def backward(
        self, saved: Saved, dout_BLND: Tensor, lse_BNL: Tensor, delta_BNL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.expansion is not None and self.choice.backward == "query":
            return _backward_at_home(self, self.expansion, saved, dout_BLND, lse_BNL, delta_BNL)
        q_BLND, k_BLKD, v_BLKD = saved.tensors
        return _ring_backward(self, q_BLND, k_BLKD, v_BLKD, dout_BLND, lse_BNL, delta_BNL)

    def comm_plan(self, sends_queries: bool) -> CommPlan:
        """What this rank does when the query side is sent, or the key side."""
        return self._queries_sent if sends_queries else self._keys_sent

    @cached_property
    def _queries_sent(self) -> CommPlan:
        return self._comm_plan(True)

    @cached_property
    def _keys_sent(self) -> CommPlan:
        return self._comm_plan(False)

    def _comm_plan(self, sends_queries: bool) -> CommPlan:
        choice, cp = self.choice, self.cp
        return comm_plan(self.mask, cp.layout, choice.division.ring, choice.problem.seq_len, cp.rank, sends_queries)

    @cached_property
    def one_call(self) -> Visible | None:
        """Of a single rank with every query and key in one call."""
        if self.cp.size > 1 or self.cut is not None or self.choice.problem.latent_dim:
            return None
        calls, every = self.comm_plan(False).steps[0].calls, slice(0, self.choice.problem.seq_len)
        return calls[0].visible if len(calls) == 1 and calls[0][:2] == (every, every) else None


def _ring_forward(plan: RingPlan, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
    if plan.cut is not None:
        # A p2p ring forwards whole chunks: keys that no rank needs are dropped before.
        seq_len = plan.choice.problem.seq_len
        needed = reach(plan.mask, plan.cp.layout, plan.cp.size, seq_len)
        q_BLND = q_BLND[:, : plan.cp.rows_before(plan.cut, seq_len)]
        k_BLKD, v_BLKD = k_BLKD[:, :needed], v_BLKD[:, :needed]
    with plan.streams.begin() as streams:
        output = OutputAccumulator(q_BLND, streams, plan.choice.problem.value_dim)
        steps = ring_steps(plan, RemoteChunk((k_BLKD, v_BLKD), KEY_SIDE_DIMS), plan.comm_plan(False), streams)
        for index in itertools.count():
            # A chunk is waited for on the stream that uses it: the other one's kernel delays no transfer.
            with streams.turn(index):
                found = next(steps, None)
                if found is None:
                    break
                step, chunk = found
                if index:
                    streams.share(chunk.tensors)
                if plan.expansion is not None:
                    chunk = plan.expansion.keys_of(chunk, step.calls)
                for queries, keys, visible in step.calls:
                    q_BRND, (k_BMKD, v_BMKD) = q_BLND[:, queries], chunk.tokens(keys)
                    part_BLND, part_lse_BNL = plan.kernel.forward(q_BRND, k_BMKD, v_BMKD, visible, plan.scale)
                    output.update(queries, part_BLND, part_lse_BNL)
                    del q_BRND, k_BMKD, v_BMKD
                del chunk, found  # frees its memory before the chunk after the next one arrives
        streams.join()
        return output.result()


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
    choice, comms = plan.choice, plan.comms
    sends_queries, deterministic = choice.backward == "query", choice.choices.deterministic
    work, node_size = plan.comm_plan(sends_queries), choice.division.ring.node_size
    part_dtype = q_BLND.dtype if plan.kernel.writes_input_dtype else accumulation_dtype(q_BLND.dtype)
    first_dtype, later_dtype, inter_dtype = (q_BLND.dtype if narrow else None for narrow in choice.narrow_grads)

    query_side = RemoteChunk((q_BLND, dout_BLND, lse_BNL, delta_BNL), QUERY_SIDE_DIMS)
    key_side = RemoteChunk((k_BLKD, v_BLKD), KEY_SIDE_DIMS)
    local_grads = tuple(GradAccumulator(t, part_dtype) for t in (key_side.tensors if sends_queries else (q_BLND,)))
    reduce = InterNodeGradReduce(plan.cp.rank // node_size, comms.inter_node_gradients, inter_dtype, work)

    for step, chunk in ring_steps(plan, query_side if sends_queries else key_side, work):
        queries, keys = (chunk, key_side) if sends_queries else (query_side, chunk)
        chunk_grads = tuple(GradAccumulator(t, part_dtype) for t in ((q_BLND,) if sends_queries else key_side.tensors))
        dq, dk, dv = (*chunk_grads, *local_grads) if sends_queries else (*local_grads, *chunk_grads)
        expanded = None
        if plan.expansion is not None and step.calls:
            expanded = ExpandedChunk(plan.expansion, chunk, step.calls, part_dtype)
            keys, (dk, dv) = expanded.keys, expanded.gradients
        for q_tokens, k_tokens, visible in step.calls:
            inputs = BackwardInputs(*queries.tokens(q_tokens), *keys.tokens(k_tokens))
            dq_part, dk_part, dv_part = plan.kernel.backward(inputs, visible, plan.scale, deterministic)
            dq.add(q_tokens, dq_part)
            dk.add(k_tokens, dk_part)
            dv.add(k_tokens, dv_part)
            del inputs, dq_part, dk_part, dv_part
        if expanded is not None:
            expanded.contract_into(chunk_grads)
        if step.inner_step == 0:
            intra_dtype = later_dtype if step.outer_step else first_dtype
            grad_return = comms.intra_node.grad_return(intra_dtype, work.inner_rings[step.outer_step])
        grad_return.add(step.inner_step, chunk_grads)
        if step.inner_step + 1 == node_size:
            reduce.add(step.outer_step, grad_return.finish())
        del chunk, queries, keys, expanded, dk, dv

    own_grads = reduce.finish()  # on one node, what `grad_return` has returned
    sums = (*own_grads, *local_grads) if sends_queries else (*local_grads, *own_grads)
    dtypes = q_BLND.dtype, *(plan.key_gradient_dtype or q_BLND.dtype,) * 2
    dq_BLND, dk_BLKD, dv_BLKD = (gradient.final(dtype) for gradient, dtype in zip(sums, dtypes, strict=True))
    return dq_BLND, dk_BLKD, dv_BLKD


def _backward_at_home(
    plan: RingPlan, expansion: Expansion, saved: Saved, dout_BLND: Tensor, lse_BNL: Tensor, delta_BNL: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward that sends the query side, of a latent: K and V stay on this rank, and so do their gradients. One
    expansion and one contraction of this rank's own tokens."""
    q_BLND, shared_BL1R, latent_BL1C = saved.tensors
    k_BLND, v_BLND = expansion.keys(shared_BL1R, latent_BL1C)
    plain, dtype = replace(plan, expansion=None, key_gradient_dtype=None), plan.key_gradient_dtype
    dq_BLND, dk_BLND, dv_BLND = _ring_backward(plain, q_BLND, k_BLND, v_BLND, dout_BLND, lse_BNL, delta_BNL)
    del k_BLND, v_BLND  # the contraction needs their memory
    dshared_BL1R, dlatent_BL1C = expansion.contracted(dk_BLND, dv_BLND, latent_BL1C)
    return dq_BLND, dshared_BL1R.to(dtype or q_BLND.dtype), dlatent_BL1C.to(dtype or q_BLND.dtype)


def ring_steps(
    plan: RingPlan, own: RemoteChunk, work: CommPlan, streams: StreamPass = ONE_STREAM
) -> Iterator[tuple[RingStep, RemoteChunk]]:
    """Every rank's chunk, this rank's own first; the next one is received while a step uses the current one. `streams`
    are those that the steps use in turn."""
    nodes, spec, comms = len(work.inner_rings), ChunkSpec.of(own), plan.comms
    node, local_rank = divmod(plan.cp.rank, plan.choice.division.ring.node_size)
    steps, held = iter(work.steps), own
    for outer_step, ranges in enumerate(work.inner_rings):
        transfer = None
        if outer_step + 1 < nodes:
            assert comms.inter_node is not None
            next_held = work.inner_rings[outer_step + 1].held
            assert next_held is not None
            coming = next_held[local_rank]
            leaving = tuple(tensor.contiguous() for tensor in held.cut(work.leaving[outer_step]))
            to, source = (node + 1) % nodes, (node - 1) % nodes
            transfer = comms.inter_node.start(leaving, to, spec.of_tokens(coming), source)
        # No name here holds a chunk: the caller alone decides when its memory is free.
        yield from map(_with_step, comms.intra_node.inner_ring(held, spec, ranges), steps)
        if transfer is not None:
            held = RemoteChunk(transfer.wait(), own.token_dims, coming[0])
            streams.share(leaving)  # was sent on one stream, and waited for here, perhaps on another
            del leaving


def _with_step(chunk: RemoteChunk, step: RingStep) -> tuple[RingStep, RemoteChunk]:
    return step, chunk
