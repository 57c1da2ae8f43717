"""A budget of GPU memory that a trial cannot pass: `memory: 80GiB` on a GPU that has more."""

from __future__ import annotations

import torch

from engine.settings import size_in_bytes


def limit_memory(memory: str, device: torch.device) -> None:
    """Let torch's allocator reserve no more than `memory` on this device; empty: as much as there is.

    Beyond it an allocation fails as on a full GPU, after the allocator has given back what no tensor uses. Windows of
    symmetric memory and the CUDA context are outside the allocator, and not limited. No effect on a CPU.
    """
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    share = min(1.0, size_in_bytes(memory, "memory") / total) if memory else 1.0
    # Also where nothing is asked for: ranks that run several trials would keep the limit of the last one.
    torch.cuda.set_per_process_memory_fraction(share, device)
