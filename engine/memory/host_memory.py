"""Host memory that a GPU copies to and from at full speed, in buffers of exactly the requested size.

torch's pinned allocator rounds every block up to a power of two, which at tens of GiB wastes up to half of a host's
memory. Here whole pages are mapped and then registered with CUDA; without a GPU the same pages are plain memory. Large
pages where the system has them: the time of locking grows with the number of pages.
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor


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
