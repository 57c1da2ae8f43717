"""Exchange patterns: how chunks of the sequence and their gradients move among the ranks of an inner ring.

Two patterns share one interface. In the *p2p ring* (setting `relay`) every rank sends to its right neighbour and
receives from its left: chunks are forwarded step by step, and each chunk's gradient follows one step behind, with every
rank's part added on the way (RingAttention, arXiv:2310.01889). In *all-pairs p2p* (settings `direct`, `copy_engine`)
the owner sends its chunk to each rank itself, and each rank returns its part of the gradient to the owner. The order of
the steps is the same. All-pairs p2p needs links between all ranks (NVLink has them), sends only the tokens that the
receiver's mask can see, and can send a gradient as the kernel wrote it in bf16, because no rank adds to it on the way.

A rank's place in an inner ring is its local rank. Between nodes, a double ring's chunks move by plain transfers
(`engine.attention.algorithms.ring`) and their gradients return by `InterNodeGradReduce`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.accumulate.accumulators import GradAccumulator, TensorSpec, tensor_specs
from engine.attention.comm.p2p import Transfer, Transport
from engine.attention.comm_plan import ChunkRanges, CommPlan, TokenRange
from engine.attention.comm_volume import HELD_GRADIENTS


@dataclass(frozen=True, slots=True)
class RemoteChunk:
    """A rank's shard, or the part of it that is needed here: local tokens [start, ...) of its owner.

    Where no token is needed there are no tensors.
    """

    tensors: tuple[Tensor, ...]
    token_dims: tuple[int, ...]  # of each tensor
    start: int = 0

    def tokens(self, tokens: slice) -> tuple[Tensor, ...]:
        """Local tokens `tokens` of the owner, as views."""
        start, count = tokens.start - self.start, tokens.stop - tokens.start
        if start == 0 and all(t.shape[dim] == count for t, dim in zip(self.tensors, self.token_dims, strict=True)):
            return self.tensors  # no views of whole tensors: the host makes some for each step
        pairs = zip(self.tensors, self.token_dims, strict=True)
        return tuple(tensor.narrow(dim, start, count) for tensor, dim in pairs)

    def cut(self, tokens: TokenRange) -> tuple[Tensor, ...]:
        """As `tokens`; nothing where there are none."""
        return self.tokens(slice(*tokens)) if tokens[0] < tokens[1] else ()


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """Shapes and dtypes of a whole shard's tensors, with the token dimension of each."""

    whole: tuple[TensorSpec, ...]
    token_dims: tuple[int, ...]

    @classmethod
    def of(cls, shard: RemoteChunk) -> ChunkSpec:
        return cls(tensor_specs(shard.tensors), shard.token_dims)

    def of_tokens(self, tokens: TokenRange) -> tuple[TensorSpec, ...]:
        """The same of some tokens; nothing where there are none."""
        count = tokens[1] - tokens[0]
        if count == 0:
            return ()
        pairs = zip(self.whole, self.token_dims, strict=True)
        return tuple(TensorSpec((*t.shape[:dim], count, *t.shape[dim + 1 :]), t.dtype) for t, dim in pairs)


class GradReturn(Protocol):
    """Returns the gradients of remote chunks to the local ranks that own the chunks."""

    def add(self, step: int, grads: tuple[GradAccumulator, ...]) -> None:
        """Add the gradients that this rank computed at `step`: of the chunk of local rank i - step."""
        ...

    def finish(self) -> tuple[GradAccumulator, ...]:
        """Gradients of this rank's chunk, summed over the inner ring."""
        ...


class ExchangePattern(Protocol):
    """How chunks and gradients move among the local ranks of one inner ring."""

    def inner_ring(self, held: RemoteChunk, spec: ChunkSpec, ranges: ChunkRanges) -> Iterator[RemoteChunk]:
        """Chunks of local ranks i, i - 1, ..., `held` first; the next is received while this one is used."""
        ...

    def grad_return(self, comm_dtype: torch.dtype | None, ranges: ChunkRanges) -> GradReturn:
        """A return of this inner ring's gradients. Sums are sent in `comm_dtype`, or as they are when None."""
        ...


@dataclass(frozen=True, slots=True)
class P2PRing:
    """Neighbours forward whole chunks around the `size` local ranks; gradients follow one step behind.

    A rank keeps its own part of its own chunk's gradient and adds the received sum at the end, so each gradient crosses
    size - 1 links.
    """

    local_rank: int
    size: int
    chunks: Transport
    gradients: Transport

    @property
    def peers(self) -> tuple[int, int]:
        """(local rank to send to, local rank to receive from)."""
        return (self.local_rank + 1) % self.size, (self.local_rank - 1) % self.size

    def inner_ring(self, held: RemoteChunk, spec: ChunkSpec, ranges: ChunkRanges) -> Iterator[RemoteChunk]:
        to, source = self.peers
        for step in range(1, self.size):
            coming = ranges.held[(self.local_rank - step) % self.size] if ranges.held else None
            expected = spec.whole if coming is None else spec.of_tokens(coming)
            transfer = self.chunks.start(held.tensors, to, expected, source)
            yield held
            held = RemoteChunk(transfer.wait(), spec.token_dims, coming[0] if coming else 0)
        yield held

    def grad_return(self, comm_dtype: torch.dtype | None, ranges: ChunkRanges) -> GradReturn:
        return _RingGradReturn(self, comm_dtype)


class _RingGradReturn:
    """Sums follow the chunks: received from the left, added to, sent to the right."""

    def __init__(self, ring: P2PRing, comm_dtype: torch.dtype | None) -> None:
        self._ring, self._comm_dtype = ring, comm_dtype
        self._own: tuple[GradAccumulator, ...] = ()
        self._transfer: Transfer | None = None

    def add(self, step: int, grads: tuple[GradAccumulator, ...]) -> None:
        if step == 0:
            self._own = grads
            return
        sums = tuple(grad.total() for grad in grads)
        if self._transfer is not None:
            for total, received in zip(sums, self._transfer.wait(), strict=True):
                total += received
        to, source = self._ring.peers
        outgoing = sums if self._comm_dtype is None else tuple(total.to(self._comm_dtype) for total in sums)
        self._transfer = self._ring.gradients.start(outgoing, to, tensor_specs(outgoing), source)

    def finish(self) -> tuple[GradAccumulator, ...]:
        if self._transfer is not None:
            for own, received in zip(self._own, self._transfer.wait(), strict=True):
                own.add(slice(0, received.shape[1]), received)
        return self._own


@dataclass(frozen=True, slots=True)
class AllPairsP2P:
    """Owners send to every local rank themselves, each only the tokens it needs; gradients return directly."""

    local_rank: int
    size: int
    chunks: Transport
    gradients: Transport

    def inner_ring(self, held: RemoteChunk, spec: ChunkSpec, ranges: ChunkRanges) -> Iterator[RemoteChunk]:
        def start(step: int) -> Transfer:
            to, source = (self.local_rank + step) % self.size, (self.local_rank - step) % self.size
            expected = spec.of_tokens(ranges.used[source, self.local_rank])
            return self.chunks.start(held.cut(ranges.used[self.local_rank, to]), to, expected, source)

        self.chunks.reserve(spec.of_tokens((0, ranges.longest)))
        pending = start(1) if self.size > 1 else None
        yield held
        for step in range(1, self.size):
            assert pending is not None
            current = pending
            received = current.wait()
            pending = start(step + 1) if step + 1 < self.size else None
            owner = (self.local_rank - step) % self.size
            yield RemoteChunk(received, spec.token_dims, ranges.used[owner, self.local_rank][0])
            current.release()

    def grad_return(self, comm_dtype: torch.dtype | None, ranges: ChunkRanges) -> GradReturn:
        return _DirectGradReturn(self, comm_dtype, ranges)


class _DirectGradReturn:
    """Each part is sent to the chunk's owner, which adds it to its own."""

    def __init__(self, pattern: AllPairsP2P, comm_dtype: torch.dtype | None, ranges: ChunkRanges) -> None:
        self._pattern, self._comm_dtype, self._ranges = pattern, comm_dtype, ranges
        self._own: tuple[GradAccumulator, ...] = ()
        self._pending: tuple[Transfer, slice] | None = None
        self._held = 0  # received gradients that wait in their slots to be summed

    def add(self, step: int, grads: tuple[GradAccumulator, ...]) -> None:
        pattern, ranges, comm_dtype = self._pattern, self._ranges, self._comm_dtype
        if step == 0:
            self._own = grads
            longest = slice(0, ranges.longest)
            pattern.gradients.reserve(tuple(grad.spec(longest, comm_dtype, ranges.all_unreduced) for grad in grads))
            return
        here = pattern.local_rank
        owner, worker = (here - step) % pattern.size, (here + step) % pattern.size
        tokens = ranges.used[here, worker]
        outgoing = _sent_grads(grads, ranges.used[owner, here], comm_dtype, ranges.unreduced[owner, here])
        expected = _expected_grads(self._own, tokens, comm_dtype, ranges.unreduced[here, worker])
        if self._held == HELD_GRADIENTS:
            # Every rank starts the message that needs a slot after the slot's release: a stream then never waits for
            # work queued behind the wait itself, also where the device runs several streams as one.
            self._sum_held()
        transfer = pattern.gradients.start(outgoing, owner, expected, worker)
        self._receive()
        self._pending = (transfer, slice(*tokens))

    def _receive(self) -> None:
        """Wait for the transfer under way and add the received gradients to this rank's own."""
        if self._pending is None:
            return
        transfer, tokens = self._pending
        self._pending = None
        received = transfer.wait()
        if not received:
            self._sum_held()  # messages are released in their order
            transfer.release()
            return
        release = _at_call(len(received), transfer.release)
        for own, gradient in zip(self._own, received, strict=True):
            own.add(tokens, gradient, release)
        self._held += 1

    def _sum_held(self) -> None:
        """Sum the gradients that wait in receive slots, which releases the slots."""
        for own in self._own:
            own.total()
        self._held = 0

    def finish(self) -> tuple[GradAccumulator, ...]:
        self._receive()
        return self._own


class InterNodeGradReduce:
    """Returns gradients that a node has summed to the owner's node: each crosses between nodes once."""

    def __init__(self, node: int, transport: Transport | None, comm_dtype: torch.dtype | None, plan: CommPlan) -> None:
        """`node`: this rank's, which owns the chunks that it holds in outer step 0."""
        self._node, self._nodes = node, len(plan.inner_rings)
        self._transport, self._comm_dtype, self._plan = transport, comm_dtype, plan
        self._own: tuple[GradAccumulator, ...] = ()
        self._pending: tuple[Transfer, slice] | None = None

    def add(self, outer_step: int, sums: tuple[GradAccumulator, ...]) -> None:
        """Add this node's sums for the chunk of node - outer_step, same local rank."""
        if outer_step == 0:
            self._own = sums
            if self._nodes > 1:
                for own in sums:
                    own.total()  # releases the receive slots before the next inner ring needs them
            return
        assert self._transport is not None
        nodes, plan, comm_dtype = self._nodes, self._plan, self._comm_dtype
        to, source = (self._node - outer_step) % nodes, (self._node + outer_step) % nodes
        outgoing = _sent_grads(sums, plan.given[outer_step], comm_dtype, plan.given_unreduced[outer_step])
        tokens, unreduced = plan.returned[outer_step], plan.returned_unreduced[outer_step]
        expected = _expected_grads(self._own, tokens, comm_dtype, unreduced)
        self._receive()
        self._pending = (self._transport.start(outgoing, to, expected, source), slice(*tokens))

    def _receive(self) -> None:
        if self._pending is None:
            return
        transfer, tokens = self._pending
        self._pending = None
        received = transfer.wait()
        for own, gradient in zip(self._own if received else (), received, strict=True):
            own.add(tokens, gradient)
        transfer.release()

    def finish(self) -> tuple[GradAccumulator, ...]:
        """Gradients of this rank's own shard, from all nodes."""
        self._receive()
        return self._own


@dataclass(frozen=True, slots=True)
class RingComms:
    """The communication of one ring: inside a node, and between the same local ranks of different nodes.

    Chunks and gradients have a communicator each: on a shared one the returning gradients would queue behind the
    chunks, and a group that spans nodes never reaches NVLink speed inside one.
    """

    intra_node: ExchangePattern
    inter_node: Transport | None = None
    inter_node_gradients: Transport | None = None


def _sent_grads(
    grads: tuple[GradAccumulator, ...], tokens: TokenRange, comm_dtype: torch.dtype | None, unreduced: bool
) -> tuple[Tensor, ...]:
    """Gradients of some tokens as they are sent; nothing where there are no tokens."""
    start, stop = tokens
    return tuple(grad.over(slice(start, stop), comm_dtype, unreduced) for grad in grads if stop > start)


def _expected_grads(
    grads: tuple[GradAccumulator, ...], tokens: TokenRange, comm_dtype: torch.dtype | None, unreduced: bool
) -> tuple[TensorSpec, ...]:
    """Specs of the tensors that a peer's `_sent_grads` returns with the same arguments."""
    start, stop = tokens
    return tuple(grad.spec(slice(start, stop), comm_dtype, unreduced) for grad in grads if stop > start)


def _at_call(number: int, action: Callable[[], None]) -> Callable[[], None]:
    """A function whose `number`-th call runs `action`."""
    left = itertools.count(number - 1, -1)

    def call() -> None:
        if next(left) == 0:
            action()

    return call
