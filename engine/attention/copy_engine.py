"""Transfers inside a node by the GPU's copy engines, through symmetric memory.

NCCL's send and receive run as kernels: they take multiprocessors from the attention kernel beside them and wait for it
when it has taken all. Copies between GPUs that can address each other's memory need none. Each rank owns a window of
receive slots that its peers write into; arrival and release are counters in the same memory, written and awaited by
the stream itself, so no kernel spins and the host never blocks.

Flow of message n from A to B, slot n mod s: A's copy stream waits until B has released message n - s, copies into B's
slot, then sets B's `arrived[A]` to n + 1. B's compute stream waits for that, uses the slot, and B's release stream sets
`released[B]` to n + 1 at every peer. All ranks number their messages alike, because transfers are collective in order.

Sources: torch.distributed._symmetric_memory; the CUDA driver's stream memory operations. The same idea carries NCCL
2.28's copy-engine collectives.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention import cuda_driver
from engine.attention.like import Like
from engine.attention.transport import Traffic, Transfer

ALIGNMENT = 256  # bytes; every tensor of a message starts on such a boundary


@lru_cache(maxsize=1)
def copy_engine_missing(device: torch.device) -> str | None:
    """Why transfers by copy engine cannot run on `device`, or None."""
    if device.type != "cuda":
        return f"exchange copy_engine needs CUDA GPUs, found {device.type}; choose exchange auto or direct"
    missing = cuda_driver.driver_missing()
    if missing:
        return f"exchange copy_engine needs the CUDA driver's stream memory operations ({missing}); choose direct"
    here, peers = torch.cuda.current_device(), range(torch.cuda.device_count())
    if not all(torch.cuda.can_device_access_peer(here, peer) for peer in peers if peer != here):
        return "exchange copy_engine needs GPUs that address each other's memory and these do not; choose direct"
    return None


@lru_cache(maxsize=1)
def _release_stream() -> torch.cuda.Stream:
    """One stream for all release counters: they wait for this rank's own work only, so they cannot block each other."""
    return torch.cuda.Stream(priority=-1)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class _Window:
    """Receive slots of every rank of the group, mapped into this process, and the counters that guard them."""

    def __init__(self, group: dist.ProcessGroup, slots: int, slot_bytes: int) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.slots, self.slot_bytes = slots, slot_bytes
        self._size, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._counters = _aligned(2 * self._size * 4)
        self.nbytes = self._counters + slots * slot_bytes
        device = torch.device("cuda", torch.cuda.current_device())
        self._memory = symmetric_memory.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._memory[: self._counters].zero_()
        self._handle = symmetric_memory.rendezvous(self._memory, group=group)
        self._bases = [
            int(self._handle.get_buffer(rank, (self.nbytes,), torch.uint8).data_ptr()) for rank in range(self._size)
        ]
        self._views: dict[tuple[int, tuple[Like, ...]], tuple[Tensor, ...]] = {}
        self.meet()  # no one writes into a window whose counters are not yet zero

    def meet(self) -> None:
        """Wait until all ranks have got here and all that they launched before is done."""
        torch.cuda.synchronize()
        self._handle.barrier()
        torch.cuda.synchronize()

    def slot(self, rank: int, message: int) -> int:
        """Address of the slot of `rank` that `message` lands in."""
        return self._bases[rank] + self._counters + message % self.slots * self.slot_bytes

    def arrived(self, at: int, source: int) -> int:
        """Address, at rank `at`, of the count of messages that have arrived from `source`."""
        return self._bases[at] + 4 * source

    def released(self, at: int, by: int) -> int:
        """Address, at rank `at`, of the count of messages that `by` has released."""
        return self._bases[at] + 4 * (self._size + by)

    def received(self, message: int, expected: tuple[Like, ...]) -> tuple[Tensor, ...]:
        """The tensors of `message` where they arrived, in this rank's own slot."""
        key = (message % self.slots, expected)
        if key not in self._views:
            views, offset = [], self._counters + message % self.slots * self.slot_bytes
            for like in expected:
                views.append(self._memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape))
                offset += _aligned(like.nbytes)
            self._views[key] = tuple(views)
        return self._views[key]


class CopyEngine:
    """An `engine.attention.transport.Transport` for the ranks of one node. Its window grows to the largest message.

    At most `slots` - 1 received messages may be held unreleased while the next one is waited for.
    """

    def __init__(self, group: dist.ProcessGroup, traffic: Traffic, slots: int) -> None:
        self._group, self._traffic, self._slots = group, traffic, slots
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._messages = 0
        self._window: _Window | None = None
        self._copies = torch.cuda.Stream(priority=-1)

    def reserve(self, largest: tuple[Like, ...]) -> None:
        """Make room for messages as large as `largest`. Collective with equal arguments; free when there is room."""
        slot_bytes = sum(_aligned(like.nbytes) for like in largest)
        if self._window is not None and self._window.slot_bytes >= slot_bytes:
            return
        if self._window is not None:
            self._window.meet()  # nobody may still read from or write into the old one
            self._traffic.window_bytes -= self._window.nbytes
        self._window, self._messages = None, 0
        self._window = _Window(self._group, self._slots, slot_bytes)
        self._traffic.window_bytes += self._window.nbytes

    def start(self, sent: tuple[Tensor, ...], to: int, expected: tuple[Like, ...], source: int) -> Transfer:
        assert self._window is not None, "reserve comes first"
        push = _Push(self, self._window, self._messages, expected, source)
        self._messages += 1
        if sent:
            push.send(tuple(tensor.contiguous() for tensor in sent), to)
        return push

    def push(self, window: _Window, message: int, sent: tuple[Tensor, ...], to: int) -> torch.cuda.Event:
        """Enqueue the copies of `message`; returns the event after which `sent` may be overwritten."""
        self._traffic.add(*sent)
        self._copies.wait_event(torch.cuda.current_stream().record_event())
        stream = self._copies.cuda_stream
        if message >= window.slots:
            cuda_driver.await_counter(stream, window.released(self._rank, by=to), message - window.slots + 1)
        target = window.slot(to, message)
        for tensor in sent:
            nbytes = tensor.numel() * tensor.itemsize
            cuda_driver.copy(stream, target, tensor.data_ptr(), nbytes)
            target += _aligned(nbytes)
        cuda_driver.set_counter(stream, window.arrived(to, source=self._rank), message + 1)
        return self._copies.record_event()

    def pull(self, window: _Window, message: int, expected: tuple[Like, ...], source: int) -> tuple[Tensor, ...]:
        """Make the current stream wait for `message` and return it where it lies."""
        stream = torch.cuda.current_stream().cuda_stream
        cuda_driver.await_counter(stream, window.arrived(self._rank, source=source), message + 1)
        return window.received(message, expected)

    def release(self, window: _Window, message: int) -> None:
        """Tell all peers that the slot of `message` may be written again once the current stream gets here."""
        stream = _release_stream()
        stream.wait_event(torch.cuda.current_stream().record_event())
        for peer in range(self._size):
            if peer != self._rank:
                cuda_driver.set_counter(stream.cuda_stream, window.released(peer, by=self._rank), message + 1)


class _Push:
    """Transfer of `CopyEngine`."""

    def __init__(
        self, engine: CopyEngine, window: _Window, message: int, expected: tuple[Like, ...], source: int
    ) -> None:
        self._engine, self._window, self._message = engine, window, message
        self._expected, self._source = expected, source
        self._sent: tuple[Tensor, ...] = ()
        self._pushed: torch.cuda.Event | None = None

    def send(self, sent: tuple[Tensor, ...], to: int) -> None:
        """Enqueue the sending half."""
        self._sent = sent
        self._pushed = self._engine.push(self._window, self._message, sent, to)

    def wait(self) -> tuple[Tensor, ...]:
        if self._pushed is not None:
            # The allocator may hand the sent tensors' memory to the current stream once they are dropped here.
            torch.cuda.current_stream().wait_event(self._pushed)
            self._sent = ()
        if not self._expected:
            return ()
        return self._engine.pull(self._window, self._message, self._expected, self._source)

    def release(self) -> None:
        self._engine.release(self._window, self._message)
