"""Point-to-point transfers between ranks: their bytes are counted, and their failures are sentences.

Nothing here blocks the host: on a GPU, `wait` makes the current stream wait for the transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import RLock
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.accumulate.accumulators import TensorSpec
from engine.attention.comm.agreement import Agreement, Calls
from engine.cuda.streams import keep_until_over, unrecorded

_QUOTED_CHARACTERS = 160  # of another error's first line


@dataclass(slots=True)
class Traffic:
    """Bytes that attention sends to other ranks, and the memory it holds to receive into."""

    sent_bytes: int = 0
    window_bytes: int = 0  # memory held to receive into, outside the allocator's own count
    tag: int = 0  # of the messages of the call under way, for transports that match messages by tags

    def reset(self) -> None:
        """Start counting sent bytes anew."""
        self.sent_bytes = 0

    def add(self, *tensors: Tensor) -> None:
        """Count tensors that are being sent."""
        self.sent_bytes += sum(tensor.numel() * tensor.itemsize for tensor in tensors)


class Transfer(Protocol):
    """A transfer under way: sending to one peer, receiving from another.

    Its memory is that of the stream that started it. Where another stream waits for it, the caller sees to it that
    neither the received tensors nor the sent ones are freed before the first stream has waited for the second.
    """

    def wait(self) -> tuple[Tensor, ...]:
        """The received tensors, usable by later work on the current stream. Called once."""
        ...

    def release(self) -> None:
        """The last use of the received tensors has been launched: later messages may be received into their memory."""
        ...


class Transport:
    """Sends tensors from one rank of a group to another. A subclass sends; this one is that of a single rank, which
    starts no transfer."""

    def reserve(self, largest: tuple[TensorSpec, ...]) -> None:
        """No later message is larger than `largest`. Collective, with equal arguments on every rank of the group.
        Nothing to do where every message gets memory of its own."""

    def start(self, sent: tuple[Tensor, ...], to: int, expected: tuple[TensorSpec, ...], source: int) -> Transfer:
        """Send `sent` to group rank `to` while receiving `expected` from group rank `source`; either may be empty.

        Collective in order: all ranks of the group start their transfers in the same sequence.
        """
        raise AssertionError("a single rank sends nothing")


@dataclass(slots=True)
class _SendReceive:
    """Transfer of `PointToPoint`. All its tensors are held until it has been waited for: nothing else holds them
    (`engine.cuda.streams`)."""

    received: tuple[Tensor, ...]
    sent: tuple[Tensor, ...]
    group: dist.ProcessGroup
    peers: str
    works: list[dist.Work]
    copies: tuple[Tensor, ...]  # those of `sent` that `start` made: the caller holds none of them

    def wait(self) -> tuple[Tensor, ...]:
        with peers_needed(self.group, self.peers):
            for work in self.works:
                work.wait()
        for copy in self.copies:
            if copy.is_cuda:  # no effect on the stream that started the transfer; no caller can order another one
                copy.record_stream(torch.cuda.current_stream(copy.device))
        self.works, self.sent, self.copies = [], (), ()
        return self.received

    def release(self) -> None:
        self.received = ()

    def __del__(self) -> None:
        if self.works:
            keep_until_over(self.works, (*self.received, *self.sent))


class PointToPoint(Transport):
    """Transfers by the process group's own send and receive (NCCL or gloo), into fresh memory of the allocator, which
    has it back as soon as the last reference is gone."""

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._traffic = traffic
        self._connected = False

    def start(self, sent: tuple[Tensor, ...], to: int, expected: tuple[TensorSpec, ...], source: int) -> Transfer:
        return self.exchange([(to, tensor) for tensor in sent], [(source, spec) for spec in expected])

    def exchange(self, to: Sequence[tuple[int, Tensor]], expected: Sequence[tuple[int, TensorSpec]]) -> Transfer:
        """Send each tensor to its group rank while receiving each of `expected` from its own: `start` of many peers."""
        sent = tuple(tensor.contiguous() for _, tensor in to)
        copies = tuple(tensor for tensor, (_, original) in zip(sent, to, strict=True) if tensor is not original)
        self._traffic.add(*sent)
        device = gpu_of(self._group)
        if device is not None and not self._connected:
            # NCCL forms a group's communicator in its first call, in which all its ranks must take part. A mask may
            # leave some of them nothing to send or receive in the first message, so this call is made before it.
            dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        self._connected = True
        here, tag = device or torch.device("cpu"), self._traffic.tag
        received = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=here) for _, spec in expected)
        ends = [(dist.isend, tensor, peer) for tensor, (peer, _) in zip(sent, to, strict=True)]
        ends += [(dist.irecv, tensor, peer) for tensor, (peer, _) in zip(received, expected, strict=True)]
        sides = [dist.P2POp(end, unrecorded(tensor), self._ranks[peer], self._group, tag) for end, tensor, peer in ends]
        peers = " and ".join(f"rank {self._ranks[peer]}" for peer in sorted({peer for _, _, peer in ends}))
        with peers_needed(self._group, peers):
            works = dist.batch_isend_irecv(sides) if sides else []
        return _SendReceive(received, sent, self._group, peers, works, copies)


def send_rows(sent: Tensor, received: Tensor, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    """An all-to-all on CPUs: row r of `sent` to group rank r, which writes it into its row of `received`; with a single
    row in `sent`, that row to every rank. Messages of calls with another tag are never taken for these."""
    here, operations = dist.get_rank(group), []
    for place, rank in enumerate(dist.get_process_group_ranks(group)):
        row = sent[place if len(sent) > 1 else 0]
        if place == here:
            received[place].copy_(row)
            continue
        operations.append(dist.P2POp(dist.isend, row, rank, group, tag))
        operations.append(dist.P2POp(dist.irecv, received[place], rank, group, tag))
    return dist.batch_isend_irecv(operations)


def gpu_of(group: dist.ProcessGroup) -> torch.device | None:
    """This rank's GPU when the group's transfers run on GPUs (NCCL, alone or with gloo for the CPU), else None."""
    if "nccl" not in dist.get_backend_config(group):
        return None
    return torch.device("cuda", torch.cuda.current_device())


class BrokenContext(RuntimeError):
    """An earlier call among these ranks failed halfway: a further one would wait for ever, or mix up messages."""


class PeerLost(RuntimeError):
    """Tensors of another rank did not come, or could not be sent to it."""


_ENDED = (
    "torch.distributed was ended since this ContextParallel was made, and its process group with it; make a new "
    "ContextParallel after dist.init_process_group"
)

_TWO_THREADS = (
    "two threads of this rank were in calls of one ContextParallel at once, and ranks may pair them differently; let "
    "threads take turns, in one order on all ranks, or give each a process group and a ContextParallel of its own"
)


class CallOrder:
    """Shared by the collective calls of one context: after one of them fails, later ones are refused.

    Messages between ranks have no names: the n-th message sent is the n-th received, and slots and counters are
    numbered in the same way. (With gloo they have a tag, so that messages of two calls are never mixed up; NCCL has
    none.) A rank that fails in the middle of a call has sent fewer messages than its peers wait for, and its next call
    would receive messages of the failed one. The peers' wait ends with their group's timeout.
    """

    def __init__(self, traffic: Traffic | None = None, agreement: Agreement | None = None) -> None:
        """`agreement` is that of the context's group; without one, a failure names no other ranks."""
        self._failure: str | None = None
        self._one_thread = RLock()
        self._traffic, self._agreement = traffic or Traffic(), agreement
        self._calls = Calls() if agreement is None else agreement.calls
        self._world = dist.group.WORLD  # another one, or none, once torch.distributed was ended

    def begin(self) -> int:
        """The number of a call that begins, from 1, the same one on every rank; also of one that is refused."""
        calls = self._calls
        calls.begun, calls.said_before, calls.said = calls.begun + 1, calls.said, 0
        return calls.begun

    @contextmanager
    def kept(self, call: int = 0, *, plan: int = 0, backward: bool = False) -> Iterator[None]:
        """Around collective steps. After an exception of any kind among them, later steps raise BrokenContext.

        Args:
            call: the number of the call that the steps belong to, from 1; 0 for others.
            plan: the number of its plan, likewise.
            backward: the steps are those of its backward.
        """
        if dist.group.WORLD is not self._world:
            raise BrokenContext(_ENDED)
        if self._failure is not None:
            raise self._broken()
        if not self._one_thread.acquire(blocking=False):
            self._refuse_second_thread()
        outer, self._traffic.tag = self._traffic.tag, _tag(call, plan, backward)
        try:
            yield
            if self._failure is not None:
                raise BrokenContext(_TWO_THREADS)
        except BaseException as error:
            if self._failure is not None:
                raise
            self._failure = quoted(error)
            where = f"the {'backward' if backward else 'forward'} of call {call}" if call else "another call"
            if isinstance(error, PeerLost) and self._agreement is not None:
                known = self._agreement.failed(where, None)
                raise PeerLost(f"{error} (this rank waited in {where}; {known})" if known else str(error)) from error
            if self._agreement is not None:
                self._agreement.failed(where, self._failure)
            raise
        finally:
            self._traffic.tag = outer
            self._one_thread.release()

    def _broken(self) -> BrokenContext:
        return BrokenContext(
            f"an earlier call failed on this rank between two messages ({self._failure}), so the ranks no "
            "longer agree on the next message; end all ranks and start them again, or make a new process group and a "
            "new ContextParallel on all of them"
        )

    def _refuse_second_thread(self) -> NoReturn:
        """Raise BrokenContext in a thread that begins a call while another one is in a call. That one fails too: ranks
        may have paired it with this one."""
        self._failure = _TWO_THREADS
        if self._agreement is not None:
            self._agreement.failed("a call of a second thread", _TWO_THREADS)
        raise BrokenContext(_TWO_THREADS)


def _tag(call: int, plan: int, backward: bool) -> int:
    """31 bits that differ between all calls which may be under way at one time on two ranks."""
    # Steps of no call take the highest number: their group is one of the program's, which may use small tags itself.
    return ((call or -1) & 0x7FFF) << 16 | (plan & 0x7FFF) << 1 | backward


@contextmanager
def peers_needed(group: dist.ProcessGroup, peers: str) -> Iterator[None]:
    """Around sending, receiving and waiting: an error of the process group says that `peers` are missing, and why."""
    try:
        yield
    except RuntimeError as error:
        seconds = timeout_of(group).total_seconds()
        raise PeerLost(
            f"rank {dist.get_rank()} exchanged tensors with {peers} and they did not come (timeout {seconds:g} s; "
            f"{quoted(error)}); another rank failed or ended, skipped this call, or ran it without gradients: find "
            "the first error of all ranks, and make the same calls in the same order on all of them"
        ) from error


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a rank of `group` waits for another."""
    device = torch.device("cuda" if "nccl" in dist.get_backend_config(group) else "cpu")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def quoted(error: BaseException) -> str:
    """An error's kind and first line, as part of a sentence."""
    lines = str(error).strip().splitlines() or ["no message"]
    words = f"{type(error).__name__}: {lines[0]}"
    return words if len(words) <= _QUOTED_CHARACTERS else words[: _QUOTED_CHARACTERS - 3] + "..."
