"""CUDA streams that are not shared, and memory of transfers that is free as soon as the transfer has been waited for.

torch has 32 streams per priority and returns them in turn, to NCCL as well. Two parts of a process that asks for more
get the same stream: a copy that waits for a counter would be queued before the write that sets it, forever. The streams
of `own_stream` come from the driver. A stream without references is reused, so that a process which makes contexts of
attention one after another needs no more streams with each.

torch's process group marks each tensor that is sent or received with NCCL's stream (`record_stream`,
pytorch/pytorch#132292). The allocator does not reuse marked memory before the device has finished the transfer. The
host is layers ahead of the device, so reserved memory grows by all that those layers send. The tensors of a collective
are not marked: torch holds them until the collective is waited for, and that is enough. With `unrecorded` the process
group gets tensors over the same memory that the allocator does not own, so marking them has no effect, and the transfer
holds the tensors itself.

That is safe for memory of the stream that posts the transfer and waits for it:

- NCCL's stream waits for the posting stream when an operation is posted. What used the memory before was launched
  there, so received bytes arrive after its last use.
- `Work.wait` makes the current stream wait for NCCL's. What the allocator later puts into the memory is launched on
  that stream, so it is written after the last byte was sent or received.

Where another stream waits than the one that posted, the caller orders both (`engine.cuda.alternate`). A transfer that
is dropped before it was waited for marks its memory after all (`keep_until_over`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from engine.cuda import driver as cuda_driver

_free: defaultdict[tuple[torch.device, int], list[int]] = defaultdict(list)  # handles by device and priority


class _OwnStream(torch.cuda.ExternalStream):
    """A stream from the driver, whose handle is free for another one when it is garbage.

    By its finalizer, because weak references to torch's streams are not called back (seen with torch 2.11).
    """

    def __new__(cls, device: torch.device, priority: int) -> _OwnStream:
        free = _free[device, priority]
        handle = free.pop() if free else _created(device, priority)
        stream: _OwnStream = super().__new__(cls, handle, device=device)
        stream._give_back = functools.partial(free.append, handle)
        return stream

    def __del__(self) -> None:
        self._give_back()


def own_stream(device: torch.device | None = None, priority: int = 0) -> torch.cuda.Stream:
    """A stream of `device`, the current one when None, that neither torch, NCCL nor an earlier caller whose stream is
    still referenced uses. A lower `priority` runs first, -1 before 0. Devices that are no GPUs have no such pool:
    their stream is torch's."""
    if device is not None and device.type != "cuda":
        return torch.get_device_module(device).Stream()
    if device is None or device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if cuda_driver.driver_unsupported_reason():
        return torch.cuda.Stream(device, priority=priority)
    return _OwnStream(device, priority)


def _created(device: torch.device, priority: int) -> int:
    with torch.cuda.device(device):  # makes its context this thread's, as calls of the driver need it
        torch.cuda.current_stream(device).query()  # a first use: until then there may be no context
        return cuda_driver.create_stream(priority)


def unrecorded(tensor: Tensor) -> Tensor:
    """A tensor over the memory of `tensor` that `record_stream` has no effect on. It holds `tensor`'s memory."""
    if tensor.is_cuda and not _skips_foreign_memory():
        return tensor
    alias: Tensor = torch.from_dlpack(to_dlpack(tensor.detach()))
    return alias


@lru_cache(maxsize=1)
def _skips_foreign_memory() -> bool:
    """Whether the allocator of GPU memory ignores marks on memory that it does not own. torch's own does.
    cudaMallocAsync finds memory by its address, and refuses a part of a tensor."""
    return torch.cuda.get_allocator_backend() == "native"


def keep_until_over(works: Iterable[dist.Work], tensors: Iterable[Tensor]) -> None:
    """The allocator does not reuse the memory of `tensors` before `works` have ended. No caller waits for `works`.

    A call that failed halfway leaves such transfers, whose peers may still send. No stream of the caller waits for
    them, nor does the host: they may never come. (`Work.wait` blocks the host under TORCH_NCCL_BLOCKING_WAIT, and ends
    the group's communicator where the transfer failed.)
    """
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    if not on_gpu or sys.is_finalizing():
        return  # a transfer of the CPU holds its tensors itself
    stream = _waiting_stream(on_gpu[0].device)
    with torch.cuda.stream(stream):
        for work in works:
            with contextlib.suppress(RuntimeError):  # raised where the device has failed
                work.synchronize()
    for tensor in on_gpu:
        tensor.record_stream(stream)


@lru_cache(maxsize=8)
def _waiting_stream(device: torch.device) -> torch.cuda.Stream:
    """Waits for abandoned transfers, and is used for nothing else."""
    stream: torch.cuda.Stream = own_stream(device)
    return stream
