"""Tensors saved for backward, on the device or copied to host memory and back without stopping the GPU.

Two stores share one interface: `DeviceStore` holds references, `HostStore` copies to the host while the next layers
compute, and back shortly before backward needs the tensors. Both count the bytes they hold.

Host memory is mapped in whole pages, in buffers of exactly the requested size, and registered with CUDA, which then
copies to and from it at full speed; without a GPU the same pages are plain memory. torch's pinned allocator rounds
every block up to a power of two, which at tens of GiB wastes up to half of a host's memory. Pages are large where the
system has such: the time of locking grows with their number.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import Counter, deque
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.cuda.streams import own_stream


class _Pages(mmap.mmap):
    """Mapped memory that unlocks itself before it is unmapped. A weakref's callback would run after that."""

    locked_at = 0  # address, once CUDA has locked the pages

    def __del__(self) -> None:
        if self.locked_at:
            torch.cuda.cudart().cudaHostUnregister(self.locked_at)


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """`nbytes` of uninitialised host memory as a uint8 tensor, page-locked when `device` is a CUDA device.

    The memory is freed with the last tensor that views it, whether or not a copy still uses it: wait for the copies
    before dropping that tensor.

    Raises MemoryError when the host has no such memory, or CUDA cannot lock it.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared pages are small ones
    except OSError as error:
        raise MemoryError(f"the host has no {nbytes} bytes of memory to map ({error}); offload less") from error
    with contextlib.suppress(OSError):  # a system without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda":
        status = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, 0))
        if status != 0:
            raise MemoryError(
                f"CUDA locks no {nbytes} bytes of host memory (error {status}); raise `ulimit -l` or offload less"
            )
        pages.locked_at = buffer.data_ptr()
    return buffer


def host_like(tensor: Tensor, device: torch.device) -> Tensor:
    """An uninitialised host tensor like `tensor`, contiguous, page-locked when `device` is a CUDA device."""
    return host_buffer(tensor.numel() * tensor.itemsize, device).view(tensor.dtype).view(tensor.shape)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP2 may have sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


Tensors = tuple[Tensor, ...]


class SavedTensors(Protocol):
    """The tensors of one `put`, held by the store for as long as this object exists."""

    def prefetch(self) -> None:
        """Start the copy to the device: `fetch` follows soon."""
        ...

    def fetch(self) -> Tensors:
        """The tensors, on their device, usable by later work on the current stream. May be called again."""
        ...


class Store(Protocol):
    """Saves tensors for backward."""

    held_bytes: int  # saved now

    def put(self, tensors: Tensors) -> SavedTensors:
        """Save `tensors`; the caller drops them and does not change them."""
        ...

    def settle(self) -> None:
        """Drop the tensors held for copies to the host: later work on the current stream waits for those copies."""
        ...


class DeviceStore:
    """Saves tensors by reference, on their device."""

    def __init__(self) -> None:
        self.held_bytes = 0

    def put(self, tensors: Tensors) -> SavedTensors:
        return _OnDevice(self, tensors)

    def settle(self) -> None:
        """Nothing is copied."""


class _OnDevice:
    """Tensors saved on their device."""

    def __init__(self, store: DeviceStore, tensors: Tensors) -> None:
        self._store, self._tensors = store, tensors
        store.held_bytes += _nbytes(tensors)

    def __del__(self) -> None:
        self._store.held_bytes -= _nbytes(self._tensors)

    def prefetch(self) -> None:
        """Nothing to copy."""

    def fetch(self) -> Tensors:
        return self._tensors


class HostStore:
    """Saves tensors in page-locked host memory, in buffers of exact size that are reused from step to step.

    One stream runs all copies of a device, in both directions. A reused buffer is therefore written only after every
    earlier copy from and to it, without a wait on the host.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self.leaving_puts = 1  # the most whose copies to the host may be under way at once; may change between puts
        self._free: dict[tuple[str, int], list[Tensor]] = {}  # by kind of device and size
        self._leaving: deque[tuple[Tensors, torch.cuda.Event]] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def put(self, tensors: Tensors) -> SavedTensors:
        return _OnHost(self, tensors)

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """A host buffer of that size: a free one, or a new one."""
        free = self._free.get((device.type, nbytes))
        return free.pop() if free else host_buffer(nbytes, device)

    def reserve(self, counts: Mapping[int, int], device: torch.device) -> None:
        """Lock buffers now, so many of each size in bytes, less the free ones; free buffers of other sizes are unlocked
        first."""
        if stream := self._streams.get(device):
            stream.synchronize()  # copies may still use the dropped buffers
        sizes = {(device.type, nbytes): count for nbytes, count in counts.items()}
        self._free = {size: self._free.get(size, []) for size in sizes}
        for (kind, nbytes), count in sizes.items():
            free = self._free[kind, nbytes]
            free += [host_buffer(nbytes, device) for _ in range(count - len(free))]

    def free_buffers(self) -> Counter[int]:
        """How many free buffers there are of each size in bytes."""
        return Counter({nbytes: len(free) for (_, nbytes), free in self._free.items()})

    def return_buffer(self, buffer: Tensor, device: torch.device) -> None:
        """Make `buffer` free for another `put`; copies under way may still use it."""
        self._free.setdefault((device.type, buffer.numel()), []).append(buffer)

    def copies(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream of all copies, made to wait for the current stream's work so far; None on a CPU."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = own_stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def leaving(self, tensors: Tensors, copied: torch.cuda.Event) -> None:
        """Hold `tensors` until the current stream waits for their copy, at the event `copied`."""
        self._leaving.append((tensors, copied))
        self.settle(self.leaving_puts)

    def settle(self, still_leaving: int = 0) -> None:
        """Drop tensors whose copies are under way, but for the last few: later work may use their memory."""
        while len(self._leaving) > still_leaving:
            tensors, copied = self._leaving.popleft()
            torch.cuda.current_stream(tensors[0].device).wait_event(copied)

    def __del__(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()  # the buffers go with the store


class _OnHost:
    """Tensors saved on the host. The buffers return to the store when this object is dropped."""

    def __init__(self, store: HostStore, tensors: Tensors) -> None:
        self._store = store
        self._specs = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        self._device = tensors[0].device
        self._coming: tuple[Tensors, torch.cuda.Event | None] | None = None
        self._buffers: list[Tensor] = []
        for tensor in tensors:  # one by one: these buffers are returned when the host has no more memory
            self._buffers.append(store.take(tensor.numel() * tensor.itemsize, self._device))
            store.held_bytes += self._buffers[-1].numel()
        contiguous = tuple(tensor.contiguous() for tensor in tensors)
        copies = store.copies(self._device)  # after `contiguous`, which the copies have to wait for
        if copies is None:
            self._copy_out(contiguous)
            return
        with torch.cuda.stream(copies):
            self._copy_out(contiguous)
        store.leaving(contiguous, copies.record_event())

    def __del__(self) -> None:
        if self._coming is not None and self._coming[1] is not None:
            # Prefetched and never fetched: its memory is free for work after the copy.
            torch.cuda.current_stream(self._device).wait_event(self._coming[1])
        for buffer in self._buffers:
            self._store.held_bytes -= buffer.numel()
            self._store.return_buffer(buffer, self._device)

    def _hosted(self) -> list[Tensor]:
        """The tensors in host memory."""
        return [
            buffer.view(dtype).view(shape) for buffer, (shape, dtype) in zip(self._buffers, self._specs, strict=True)
        ]

    def _copy_out(self, tensors: Tensors) -> None:
        for host, tensor in zip(self._hosted(), tensors, strict=True):
            host.copy_(tensor, non_blocking=True)

    def prefetch(self) -> None:
        if self._coming is not None:
            return
        self._store.settle()  # backward has begun: no later put needs the device memory of the copies
        # Allocated by the current stream, which also uses and frees them; the copies follow its work so far.
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._specs)
        copies = self._store.copies(self._device)
        if copies is None:
            self._copy_in(tensors)
            self._coming = tensors, None
            return
        with torch.cuda.stream(copies):
            self._copy_in(tensors)
        self._coming = tensors, copies.record_event()

    def _copy_in(self, tensors: Tensors) -> None:
        for host, tensor in zip(self._hosted(), tensors, strict=True):
            tensor.copy_(host, non_blocking=True)

    def fetch(self) -> Tensors:
        self.prefetch()
        assert self._coming is not None
        (tensors, arrived), self._coming = self._coming, None
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        return tensors


def _nbytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
