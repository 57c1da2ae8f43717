"""How shards and their gradients travel among the ranks of a node or around a flat ring.

Two patterns share one interface. In the *relay* every rank talks to its two neighbours only: shards are handed on, and
gradients follow them, summed on the way (RingAttention, arXiv:2310.01889). In the *direct* pattern the owner sends each
rank its shard itself, and each rank sends the gradient straight home. The order of meetings is the same; direct needs
links between all ranks (NVLink has them), sends only the tokens the receiver's mask can see, and lets a gradient that
a kernel wrote in bf16 cross as it is, because nothing is added to it on the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.accumulate.gradients import GradAccumulator
from engine.attention.accumulate.tensor_spec import TensorSpec, tensor_specs
from engine.attention.comm.p2p import Transfer, Transport
from engine.attention.geometry.ring import Ring
from engine.attention.planning.comm_plan import ChunkRanges, CommPlan, TokenRange

# Gradients that may wait in a transport's receive slots, to be summed together, while the next is waited for.
HELD_GRADIENTS = 2


@dataclass(frozen=True, slots=True)
class RemoteChunk:
    """A shard, or the part of it that is needed here: `tensors` hold local tokens [start, ...) of their owner.

    Where no token is needed there are no tensors.
    """

    tensors: tuple[Tensor, ...]
    start: int = 0

    def cut(self, tokens: TokenRange, token_dims: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Some of the tokens; nothing where there are none."""
        start, stop = tokens
        if start == stop:
            return ()
        pairs = zip(self.tensors, token_dims, strict=True)
        return tuple(tensor.narrow(dim, start - self.start, stop - start) for tensor, dim in pairs)


@dataclass(frozen=True, slots=True)
class ChunkSpec:
    """What backward_side: tensors like those of a whole shard, with the token dimension of each."""

    whole: tuple[TensorSpec, ...]
    token_dims: tuple[int, ...]

    def like(self, tokens: TokenRange) -> tuple[TensorSpec, ...]:
        """Such tensors of some tokens; nothing where there are none."""
        count = tokens[1] - tokens[0]
        if count == 0:
            return ()
        pairs = zip(self.whole, self.token_dims, strict=True)
        return tuple(TensorSpec((*like.shape[:dim], count, *like.shape[dim + 1 :]), like.dtype) for like, dim in pairs)


def _after(calls: int, action: Callable[[], None]) -> Callable[[], None]:
    """A function whose `calls`-th call runs `action`."""
    left = itertools.count(calls - 1, -1)

    def call() -> None:
        if next(left) == 0:
            action()

    return call


class GradReturn(Protocol):
    """Gradients of travelling shards on their way to the slot that owns the shard."""

    def add(self, step: int, parts: tuple[GradAccumulator, ...]) -> None:
        """Hand in the gradient parts computed at `step` of the lap: for the shard of slot i - step."""
        ...

    def finish(self) -> tuple[GradAccumulator, ...]:
        """Gradients of this slot's shard, summed over the lap."""
        ...


class Pattern(Protocol):
    """How shards and gradients travel among the slots of one lap."""

    def inner_ring(self, held: RemoteChunk, cargo: ChunkSpec, needs: ChunkRanges) -> Iterator[RemoteChunk]:
        """Visits of the shards of slots i, i - 1, ..., the one that is held here first; the next backward_side while this one
        is used."""
        ...

    def homecoming(self, wire: torch.dtype | None, needs: ChunkRanges) -> GradReturn:
        """A fresh way home. Sums cross in dtype `wire`, or as they are when None."""
        ...


@dataclass(frozen=True, slots=True)
class Relay:
    """Neighbours hand whole shards on around the circle of `size` slots; gradients follow one hop behind.

    A rank keeps its own part of its own shard's gradient at home and adds the traveller when it arrives, so each
    gradient crosses size - 1 links.
    """

    slot: int
    size: int
    shards: Transport
    gradients: Transport

    @property
    def peers(self) -> tuple[int, int]:
        """(slot to send to, slot to receive from)."""
        return (self.slot + 1) % self.size, (self.slot - 1) % self.size

    def inner_ring(self, held: RemoteChunk, cargo: ChunkSpec, needs: ChunkRanges) -> Iterator[RemoteChunk]:
        to, source = self.peers
        for step in range(self.size):
            if step + 1 == self.size:
                yield held
                return
            coming = needs.held[(self.slot - step - 1) % self.size] if needs.held else None
            expected = cargo.whole if coming is None else cargo.like(coming)
            transfer = self.shards.start(held.tensors, to, expected, source)
            yield held
            held = RemoteChunk(transfer.wait(), coming[0] if coming else 0)

    def homecoming(self, wire: torch.dtype | None, needs: ChunkRanges) -> GradReturn:
        return _RelayGradReturn(self, wire)


class _RelayGradReturn:
    """Sums follow the shards: received from behind, added to, sent on."""

    def __init__(self, relay: Relay, wire: torch.dtype | None) -> None:
        self._relay, self._wire = relay, wire
        self._own: tuple[GradAccumulator, ...] = ()
        self._transfer: Transfer | None = None

    def add(self, step: int, parts: tuple[GradAccumulator, ...]) -> None:
        if step == 0:
            self._own = parts
            return
        sums = tuple(part.total() for part in parts)
        if self._transfer is not None:
            for total, received in zip(sums, self._transfer.wait(), strict=True):
                total += received
        to, source = self._relay.peers
        outgoing = sums if self._wire is None else tuple(total.to(self._wire) for total in sums)
        self._transfer = self._relay.gradients.start(outgoing, to, tensor_specs(outgoing), source)

    def finish(self) -> tuple[GradAccumulator, ...]:
        if self._transfer is not None:
            for own, received in zip(self._own, self._transfer.wait(), strict=True):
                own.add(slice(0, received.shape[1]), received)
        return self._own


@dataclass(frozen=True, slots=True)
class Direct:
    """Owners send to every slot themselves, each only the tokens it needs; gradients go straight home."""

    slot: int
    size: int
    shards: Transport
    gradients: Transport

    def inner_ring(self, held: RemoteChunk, cargo: ChunkSpec, needs: ChunkRanges) -> Iterator[RemoteChunk]:
        def start(step: int) -> Transfer:
            to, source = (self.slot + step) % self.size, (self.slot - step) % self.size
            sent = held.cut(needs.visit(self.slot, to), cargo.token_dims)
            return self.shards.start(sent, to, cargo.like(needs.visit(source, self.slot)), source)

        self.shards.reserve(cargo.like((0, needs.longest)))
        pending = start(1) if self.size > 1 else None
        yield held
        for step in range(1, self.size):
            assert pending is not None
            current = pending
            received = current.wait()
            pending = start(step + 1) if step + 1 < self.size else None
            yield RemoteChunk(received, needs.visit((self.slot - step) % self.size, self.slot)[0])
            current.release()

    def homecoming(self, wire: torch.dtype | None, needs: ChunkRanges) -> GradReturn:
        return _DirectGradReturn(self, wire, needs)


def _leaving(
    gradients: tuple[GradAccumulator, ...], tokens: TokenRange, wire: torch.dtype | None, unreduced: bool
) -> tuple[Tensor, ...]:
    """Gradients of some tokens as they cross a link; nothing where there are no tokens."""
    start, stop = tokens
    return tuple(gradient.over(slice(start, stop), wire, unreduced) for gradient in gradients if stop > start)


def _arriving(
    gradients: tuple[GradAccumulator, ...], tokens: TokenRange, wire: torch.dtype | None, unreduced: bool
) -> tuple[TensorSpec, ...]:
    """What a peer's `_leaving` with the same arguments sends."""
    start, stop = tokens
    return tuple(gradient.like(slice(start, stop), wire, unreduced) for gradient in gradients if stop > start)


class _DirectGradReturn:
    """Each part goes to its owner, which adds it to its own."""

    def __init__(self, direct: Direct, wire: torch.dtype | None, needs: ChunkRanges) -> None:
        self._direct, self._wire, self._needs = direct, wire, needs
        self._own: tuple[GradAccumulator, ...] = ()
        self._pending: tuple[Transfer, slice] | None = None
        self._held = 0  # received gradients that wait in their slots to be summed

    def add(self, step: int, parts: tuple[GradAccumulator, ...]) -> None:
        direct, needs = self._direct, self._needs
        if step == 0:
            self._own = parts
            longest = slice(0, needs.longest)
            unreduced = needs.all_unreduced
            direct.gradients.reserve(tuple(part.like(longest, self._wire, unreduced) for part in parts))
            return
        owner, host = (direct.slot - step) % direct.size, (direct.slot + step) % direct.size
        tokens = needs.visit(direct.slot, host)
        outgoing = _leaving(parts, needs.visit(owner, direct.slot), self._wire, needs.unreduced[owner, direct.slot])
        expected = _arriving(self._own, tokens, self._wire, needs.unreduced[direct.slot, host])
        if self._held == HELD_GRADIENTS:
            # The message that takes a slot is started after the slot was given back, on every rank: what a stream waits
            # for then never lies behind the wait itself, also where the device runs several streams as one.
            self._let_go()
        transfer = direct.gradients.start(outgoing, owner, expected, host)
        self._collect()
        self._pending = (transfer, slice(*tokens))

    def _collect(self) -> None:
        if self._pending is None:
            return
        transfer, tokens = self._pending
        self._pending = None
        received = transfer.wait()
        if not received:
            self._let_go()  # messages are released in their order
            transfer.release()
            return
        release = _after(len(received), transfer.release)
        for own, gradient in zip(self._own, received, strict=True):
            own.add(tokens, gradient, release)
        self._held += 1

    def _let_go(self) -> None:
        """Sum what waits in receive slots, which releases them."""
        for own in self._own:
            own.total()
        self._held = 0

    def finish(self) -> tuple[GradAccumulator, ...]:
        self._collect()
        return self._own


class InterNodeGradReduce:
    """Gradients summed inside each node, on their way to the owners' node: each crosses between nodes once."""

    def __init__(
        self, ring: Ring, cp_rank: int, across: Transport | None, wire: torch.dtype | None, comm_plan: CommPlan
    ) -> None:
        self._ring, self._node = ring, cp_rank // ring.node_size
        self._across, self._wire, self._itinerary = across, wire, comm_plan
        self._own: tuple[GradAccumulator, ...] = ()
        self._pending: tuple[Transfer, slice] | None = None

    def add(self, outer_step: int, sums: tuple[GradAccumulator, ...]) -> None:
        """Hand in this node's sums for the shard of node - cycle, same slot."""
        if outer_step == 0:
            self._own = sums
            if self._ring.nodes > 1:
                for own in sums:
                    own.total()  # what waits in receive slots is released before the next lap needs them
            return
        assert self._across is not None
        nodes, work = self._ring.nodes, self._itinerary
        to, source = (self._node - outer_step) % nodes, (self._node + outer_step) % nodes
        outgoing = _leaving(sums, work.given[outer_step], self._wire, work.given_unreduced[outer_step])
        expected = _arriving(self._own, work.returned[outer_step], self._wire, work.returned_unreduced[outer_step])
        self._collect()
        self._pending = (self._across.start(outgoing, to, expected, source), slice(*work.returned[outer_step]))

    def _collect(self) -> None:
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
        self._collect()
        return self._own
