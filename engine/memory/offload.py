"""Tensors that backward will want, kept on the device or moved to host memory and back without stopping the GPU.

Two stores share one interface: `DeviceStore` holds on to what it is given, `HostStore` copies it to the host while the
next layers compute, and back when backward comes near. Both count what they hold.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from engine.cuda.streams import own_stream
from engine.memory.host_memory import host_buffer

Tensors = tuple[Tensor, ...]

# Puts that may be leaving the device at once: the input and the attention of one layer. A tensor's memory is free one
# layer after it was put, so a copy has the time of a whole layer and device memory does not depend on when it ends.
LEAVING_PUTS = 2


class Kept(Protocol):
    """What a store holds of one `put`, for as long as this object lives."""

    def prefetch(self) -> None:
        """It will be fetched soon: start bringing it to the device."""
        ...

    def fetch(self) -> Tensors:
        """The tensors, on their device, usable by what the current stream launches next. May be called again."""
        ...


class Store(Protocol):
    """Somewhere to keep tensors."""

    held_bytes: int  # kept now

    def put(self, tensors: Tensors) -> Kept:
        """Keep `tensors`; the caller forgets them and changes them no more."""
        ...

    def settle(self) -> None:
        """Hold no tensor for the sake of a copy any more: what the current stream is given next waits for those."""
        ...


class DeviceStore:
    """Keeps tensors where they are."""

    def __init__(self) -> None:
        self.held_bytes = 0

    def put(self, tensors: Tensors) -> Kept:
        return _Here(self, tensors)

    def settle(self) -> None:
        """Nothing is copied."""


class _Here:
    """Kept where it is."""

    def __init__(self, store: DeviceStore, tensors: Tensors) -> None:
        self._store, self._tensors = store, tensors
        store.held_bytes += _nbytes(tensors)

    def __del__(self) -> None:
        self._store.held_bytes -= _nbytes(self._tensors)

    def prefetch(self) -> None:
        """It is there."""

    def fetch(self) -> Tensors:
        return self._tensors


class HostStore:
    """Keeps tensors in page-locked host memory, in buffers of exact size that are used again from step to step.

    One stream carries all copies of a device, in both directions. A buffer handed on to the next `put` is therefore
    written only after every copy from and to it that came before, and nobody has to wait for it.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self._free: dict[tuple[str, int], list[Tensor]] = {}  # by kind of device and size
        self._leaving: deque[tuple[Tensors, torch.cuda.Event]] = deque()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def put(self, tensors: Tensors) -> Kept:
        return _Away(self, tensors)

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """A host buffer of that size: one that was given back, or a new one."""
        free = self._free.get((device.type, nbytes))
        return free.pop() if free else host_buffer(nbytes, device)

    def reserve(self, count: int, nbytes: int, device: torch.device) -> None:
        """Lock so many buffers of that size now, less those that lie free; what lies free in other sizes goes back to
        the host first."""
        size = device.type, nbytes
        if stream := self._streams.get(device):
            stream.synchronize()  # copies may still use what is dropped
        self._free = {size: self._free.get(size, [])}
        while len(self._free[size]) < count:
            self._free[size].append(host_buffer(nbytes, device))

    def give_back(self, buffer: Tensor, device: torch.device) -> None:
        """No copy from or to `buffer` will be started any more but for a new owner; those under way may go on."""
        self._free.setdefault((device.type, buffer.numel()), []).append(buffer)

    def copies(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream of all copies, which from here on comes after what the current stream was given; None on a CPU."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = own_stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        return stream

    def leaving(self, tensors: Tensors, gone: torch.cuda.Event) -> None:
        """Hold `tensors` until the current stream is made to wait for their copy, at the event `gone`."""
        self._leaving.append((tensors, gone))
        self.settle(LEAVING_PUTS)

    def settle(self, still_leaving: int = 0) -> None:
        """Let go of tensors that leave the device, but for the last few: what is launched next may use their memory."""
        while len(self._leaving) > still_leaving:
            tensors, gone = self._leaving.popleft()
            torch.cuda.current_stream(tensors[0].device).wait_event(gone)

    def __del__(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()  # the buffers go with the store


class _Away:
    """Kept on the host. The buffer goes back to the store when this object is dropped."""

    def __init__(self, store: HostStore, tensors: Tensors) -> None:
        self._store = store
        self._likes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        self._device = tensors[0].device
        self._coming: tuple[Tensors, torch.cuda.Event | None] | None = None
        self._buffers: list[Tensor] = []
        for tensor in tensors:  # one by one: what is here goes back when the host has no more
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
            # On its way and never wanted: its memory is free for what comes after the copy.
            torch.cuda.current_stream(self._device).wait_event(self._coming[1])
        for buffer in self._buffers:
            self._store.held_bytes -= buffer.numel()
            self._store.give_back(buffer, self._device)

    def _hosted(self) -> list[Tensor]:
        """The tensors as they lie in host memory."""
        return [
            buffer.view(dtype).view(shape) for buffer, (shape, dtype) in zip(self._buffers, self._likes, strict=True)
        ]

    def _copy_out(self, tensors: Tensors) -> None:
        for host, tensor in zip(self._hosted(), tensors, strict=True):
            host.copy_(tensor, non_blocking=True)

    def prefetch(self) -> None:
        if self._coming is not None:
            return
        self._store.settle()  # backward has begun: nothing has to wait for room to leave any more
        # Allocated by the current stream, which also uses and frees them; the copies come after what it has so far.
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in self._likes)
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
