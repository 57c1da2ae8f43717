"""Receive slots that ranks of a node write into each other's memory by copy engine, and the counters that guard them.

NCCL's send and receive run as kernels: they take multiprocessors from the attention kernel beside them and wait for it
when it has taken all. Copies between GPUs that can address each other's memory need none. Each rank owns a buffer of
slots that its peers write into; arrival and release are counters in the same memory, written and awaited by the streams
themselves, so no kernel spins and the host never blocks.

Flow of message n from A to B, slot n mod s: A's copy stream waits until B has released message n - s, copies into B's
slot, then sets B's `arrived[A]` to n + 1. B's stream waits for that, uses the slot, and B's release stream sets
`released[B]` to n + 1 at every rank. All ranks number their messages alike, because messages are collective in order.

Sources: torch.distributed._symmetric_memory; the CUDA driver's stream memory operations. The same idea is behind NCCL
2.28's copy-engine collectives.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.accumulate.accumulators import TensorSpec
from engine.attention.comm.p2p import Traffic, Transfer, Transport
from engine.cuda import driver as cuda_driver
from engine.cuda.driver import CopyBatch, Counters
from engine.cuda.streams import own_stream

ALIGNMENT = 256  # bytes; every tensor of a message starts on such a boundary
_COUNTER_BYTES = 4


@lru_cache(maxsize=1)
def copy_engine_unsupported_reason(device: torch.device) -> str | None:
    """Why this process cannot take part in transfers by copy engine on `device`, or None.

    `engine.attention.comm.symm_mem.peers` finds whether the GPUs of several ranks can."""
    if device.type != "cuda":
        return f"exchange copy_engine needs CUDA GPUs, found {device.type}; choose exchange auto or direct"
    reason = cuda_driver.driver_unsupported_reason()
    if reason:
        return f"exchange copy_engine needs the CUDA driver's stream memory operations ({reason}); choose direct"
    return None


@lru_cache(maxsize=1)
def _release_stream() -> torch.cuda.Stream:
    """One stream for all release counters: each waits for work that was enqueued before it, so none blocks another
    forever."""
    return own_stream(priority=-1)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to where the next tensor of a message may start."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def offsets(specs: Sequence[TensorSpec]) -> list[int]:
    """Where in its slot each tensor of a message starts: one behind the other."""
    ends = itertools.accumulate(aligned(spec.nbytes) for spec in specs)
    return [end - aligned(spec.nbytes) for end, spec in zip(ends, specs, strict=True)]


def message_bytes(specs: Sequence[TensorSpec]) -> int:
    """Size of the slot that a message of such tensors needs."""
    return sum(aligned(spec.nbytes) for spec in specs)


class SymmBuffer:
    """Slots of every rank of the group, mapped into this process, and the counters that guard them.

    They count the messages that have arrived from each rank, and those that each rank has released. Counts never go
    back: the parts of a message may be left out, and any rank may write the next one in a slot.
    """

    def __init__(self, group: dist.ProcessGroup, slots: int, slot_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.slots, self.slot_bytes = slots, slot_bytes
        self._size = dist.get_world_size(group)
        self._counters = aligned(2 * self._size * _COUNTER_BYTES)
        self.nbytes = self._counters + slots * slot_bytes
        device = torch.device("cuda", torch.cuda.current_device())
        self._memory = symmetric_memory.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._memory[: self._counters].zero_()
        # torch zeroes the cells of its barrier on the stream too, and up to 2.11 does not wait for that. Behind a long
        # kernel it would run after a peer's signal, erase it, and the barrier would never end.
        torch.cuda.synchronize()
        self._handle = symmetric_memory.rendezvous(self._memory, group=group)
        self._bases = [
            int(self._handle.get_buffer(rank, (self.nbytes,), torch.uint8).data_ptr()) for rank in range(self._size)
        ]
        rank, all_ranks = dist.get_rank(group), range(self._size)
        self.arrivals = Counters([self._arrived(rank, source) for source in all_ranks])
        self.arrival_of = [Counters([self._arrived(rank, source)]) for source in all_ranks]
        self.arrived_at_all = Counters([self._arrived(at, rank) for at in all_ranks])
        self.arrived_at = [Counters([self._arrived(at, rank)]) for at in all_ranks]
        self.releases = Counters([self._released(rank, by) for by in all_ranks])
        self.release_of = [Counters([self._released(rank, by)]) for by in all_ranks]
        self.released_at_all = Counters([self._released(at, rank) for at in all_ranks])
        self._views: dict[tuple[int, tuple[TensorSpec, ...]], tuple[Tensor, ...]] = {}
        self.barrier()  # no rank writes into a buffer whose counters are not yet zero

    def barrier(self) -> None:
        """Wait until all ranks have called this and all that they launched before is done."""
        torch.cuda.synchronize()
        self._handle.barrier()
        torch.cuda.synchronize()

    def slot(self, rank: int, message: int) -> int:
        """Address of the slot of `rank` that receives `message`."""
        return self._bases[rank] + self._counters + message % self.slots * self.slot_bytes

    def _arrived(self, at: int, source: int) -> int:
        """Address, at rank `at`, of the count of messages that have arrived from `source`."""
        return self._bases[at] + _COUNTER_BYTES * source

    def _released(self, at: int, by: int) -> int:
        """Address, at rank `at`, of the count of messages that `by` has released."""
        return self._bases[at] + _COUNTER_BYTES * (self._size + by)

    def tensors(self, message: int, specs: tuple[TensorSpec, ...]) -> tuple[Tensor, ...]:
        """The tensors of `message` where they arrive, in this rank's own slot."""
        key = (message % self.slots, specs)
        if key not in self._views:
            slot = self._memory[self._counters + message % self.slots * self.slot_bytes :]
            self._views[key] = tuple(
                slot[start : start + spec.nbytes].view(spec.dtype).view(spec.shape)
                for start, spec in zip(offsets(specs), specs, strict=True)
            )
        return self._views[key]


@dataclass(frozen=True, slots=True)
class Message:
    """A message as all ranks number it, in the buffer it was opened in."""

    buffer: SymmBuffer
    number: int


class SymmMemChannel:
    """Messages among the ranks of one node, each landing in a slot of the receiver. The buffer grows to the largest.

    At most `slots` - 1 messages may be held unreleased while the next one is waited for.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, slots: int) -> None:
        self._group, self._traffic, self._slots = group, traffic, slots
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._messages = 0
        self._buffer: SymmBuffer | None = None
        self._copies = own_stream(priority=-1)

    def reserve(self, slot_bytes: int) -> None:
        """Make room for messages of `slot_bytes`. Collective with equal arguments; free when there is room."""
        if self._buffer is not None and self._buffer.slot_bytes >= slot_bytes:
            return
        if self._buffer is not None:
            self._buffer.barrier()  # no rank may still read from or write into the old one
            self._traffic.window_bytes -= self._buffer.nbytes
        self._buffer, self._messages = None, 0
        self._buffer = SymmBuffer(self._group, self._slots, slot_bytes)
        self._traffic.window_bytes += self._buffer.nbytes

    def open(self) -> Message:
        """The next message, in the numbering that all ranks share."""
        assert self._buffer is not None, "call reserve first"
        message = Message(self._buffer, self._messages)
        self._messages += 1
        return message

    def follow(self) -> None:
        """Later sends wait for all work that the current stream holds now."""
        self._copies.wait_event(torch.cuda.current_stream().record_event())

    def send(self, message: Message, to: int, tensors: Sequence[Tensor]) -> None:
        """Enqueue this rank's part of `message` to another rank: whole tensors, one behind the other."""
        buffer, number, stream = message.buffer, message.number, self._copies.cuda_stream
        if number >= buffer.slots:
            buffer.release_of[to].wait(stream, number - buffer.slots + 1)
        place = buffer.slot(to, number)
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.itemsize
            cuda_driver.copy(stream, place, tensor.data_ptr(), nbytes)
            place += aligned(nbytes)
        self._traffic.add(*tensors)
        buffer.arrived_at[to].set(stream, number + 1)

    def send_all(self, message: Message, copies: CopyBatch, tensors: Sequence[Tensor], away_bytes: int) -> None:
        """Enqueue this rank's part of `message` to every rank, itself included. The places of `copies` are the ranks'
        slots; `away_bytes` of them leave this GPU."""
        buffer, number, stream = message.buffer, message.number, self._copies.cuda_stream
        if number >= buffer.slots:
            buffer.releases.wait(stream, number - buffer.slots + 1)
        places = [buffer.slot(rank, number) for rank in range(self.size)]
        copies.launch(stream, [tensor.data_ptr() for tensor in tensors], places)
        self._traffic.sent_bytes += away_bytes
        buffer.arrived_at_all.set(stream, number + 1)

    def sent(self) -> torch.cuda.Event:
        """Event after which everything sent so far may be overwritten."""
        return self._copies.record_event()

    def await_part(self, message: Message, source: int) -> None:
        """Make the current stream wait for the part of `message` that rank `source` sends."""
        message.buffer.arrival_of[source].wait(torch.cuda.current_stream().cuda_stream, message.number + 1)

    def await_all(self, message: Message, stream: torch.cuda.Stream | None = None) -> None:
        """Make `stream`, the current one when None, wait for every rank's part of `message`."""
        stream = stream or torch.cuda.current_stream()
        message.buffer.arrivals.wait(stream.cuda_stream, message.number + 1)

    def release(
        self, message: Message, *also: torch.cuda.Event, stream: torch.cuda.Stream | None = None
    ) -> torch.cuda.Event:
        """Let the slot of `message` be written again once `stream`, the current one when None, gets here and events
        `also` are over. Returns the event of that stream."""
        here, releases = (stream or torch.cuda.current_stream()).record_event(), _release_stream()
        for event in (here, *also):
            releases.wait_event(event)
        message.buffer.released_at_all.set(releases.cuda_stream, message.number + 1)
        return here


class CopyEngine(Transport):
    """Transfers between the ranks of one node.

    At most `slots` - 1 received messages may be held unreleased while the next one is waited for.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, slots: int) -> None:
        self._channel = SymmMemChannel(group, traffic, slots)

    def reserve(self, largest: tuple[TensorSpec, ...]) -> None:
        """Make room for messages as large as `largest`. Collective with equal arguments; free when there is room."""
        self._channel.reserve(message_bytes(largest))

    def start(self, sent: tuple[Tensor, ...], to: int, expected: tuple[TensorSpec, ...], source: int) -> Transfer:
        message, pushed = self._channel.open(), None
        sent = tuple(tensor.contiguous() for tensor in sent)
        if sent:
            self._channel.follow()
            self._channel.send(message, to, sent)
            pushed = self._channel.sent()
        return _Push(self._channel, message, sent, pushed, expected, source)


class _Push:
    """Transfer of `CopyEngine`. The sent tensors are held until it has been waited for."""

    def __init__(
        self,
        channel: SymmMemChannel,
        message: Message,
        sent: tuple[Tensor, ...],
        pushed: torch.cuda.Event | None,
        expected: tuple[TensorSpec, ...],
        source: int,
    ) -> None:
        self._channel, self._message = channel, message
        self._sent, self._pushed = sent, pushed
        self._expected, self._source = expected, source

    def wait(self) -> tuple[Tensor, ...]:
        if self._pushed is not None:
            # The allocator may reuse the sent tensors' memory on the current stream once they are dropped here.
            torch.cuda.current_stream().wait_event(self._pushed)
            self._sent = ()
        if not self._expected:
            return ()
        self._channel.await_part(self._message, self._source)
        return self._message.buffer.tensors(self._message.number, self._expected)

    def release(self) -> None:
        self._channel.release(self._message)
