"""CUDA streams that are not shared. torch has 32 streams per priority and returns them in turn, to NCCL as well.

A process that runs many trials needs more than that, and two parts of one trial would then get the same stream: a copy
that waits for a counter would be queued before the write that sets it, forever. These streams come from the driver. A
stream without references is reused, so that all trials of a process share one set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from engine.cuda import driver as cuda_driver


class Handles:
    """Handles that are made when none is free, and never destroyed. `create` makes one."""

    def __init__(self, create: Callable[[], int]) -> None:
        self._create = create
        self._free: list[int] = []

    def take(self) -> int:
        """A handle that no other caller has until `give` frees it."""
        return self._free.pop() if self._free else self._create()

    def give(self, handle: int) -> None:
        """Free a handle: a later `take` returns it again."""
        self._free.append(handle)


class _OwnStream(torch.cuda.ExternalStream):
    """A stream of `handles`, which frees its handle when it is garbage.

    By its finalizer, because weak references to torch's streams are not called back (seen with torch 2.11).
    """

    def __new__(cls, handles: Handles, device: torch.device) -> _OwnStream:
        handle = handles.take()
        stream: _OwnStream = super().__new__(cls, handle, device=device)
        stream._free = functools.partial(handles.give, handle)
        return stream

    def __del__(self) -> None:
        self._free()


_handles: dict[tuple[torch.device, int], Handles] = {}  # by device and priority


def own_stream(device: torch.device | None = None, priority: int = 0) -> Any:
    """A stream of `device`, the current one when None, that neither torch, NCCL nor an earlier caller whose stream is
    still referenced uses. A lower `priority` runs first, -1 before 0. Devices that are no GPUs have no such pool:
    their stream is torch's."""
    if device is not None and device.type != "cuda":
        return torch.get_device_module(device).Stream()
    if device is None or device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if cuda_driver.driver_unsupported_reason():
        return torch.cuda.Stream(device, priority=priority)
    if (device, priority) not in _handles:
        _handles[device, priority] = Handles(lambda: _created(device, priority))
    return _OwnStream(_handles[device, priority], device)


def _created(device: torch.device, priority: int) -> int:
    with torch.cuda.device(device):  # makes its context this thread's, as calls of the driver need it
        torch.cuda.current_stream(device).query()  # a first use: until then there may be no context
        return cuda_driver.create_stream(priority)
