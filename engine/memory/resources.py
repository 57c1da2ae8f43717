"""Memory that a trial used on this rank, the most that it may use, and the software it ran on."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
from dataclasses import dataclass

import torch

from engine.settings import size_in_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Peaks of one rank. The GPU's are None without a GPU."""

    allocated_bytes: int | None  # receive windows outside the allocator included
    reserved_bytes: int | None
    rss_bytes: int
    sent_bytes: int  # by attention, in one step
    retries: int = 0  # allocations that found no memory until cached blocks were given back, while the host waited


def reset_peaks(device: torch.device) -> None:
    """Reset the GPU's peaks and counts: initialisation and warm-up are no part of them. The host's has no reset."""
    if device.type == "cuda":  # the host counts, so nothing waits for the device
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)


def usage(device: torch.device, sent_bytes: int, window_bytes: int, captured_bytes: int = 0) -> Usage:
    """Peaks since `reset_peaks`. `window_bytes` of GPU memory are outside the allocator and held throughout;
    `captured_bytes` are the peak of work that CUDA graphs replay, in memory the allocator counts as reserved alone."""
    on_gpu = device.type == "cuda"
    allocated = max(torch.cuda.max_memory_allocated(device), captured_bytes) if on_gpu else 0
    return Usage(
        allocated_bytes=allocated + window_bytes if on_gpu else None,
        reserved_bytes=torch.cuda.max_memory_reserved(device) + window_bytes if on_gpu else None,
        rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts KiB
        sent_bytes=sent_bytes,
        retries=torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if on_gpu else 0,
    )


def device_name(device: torch.device) -> str:
    """The GPU's name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def software() -> dict[str, str]:
    """Versions of the software that the figures depend on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        versions["cuda"] = torch.version.cuda or ""
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["cudnn"] = str(torch.backends.cudnn.version())
        for package in ("flash-attn-4", "fla-core", "triton"):
            try:
                versions[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue  # absent packages have no version to record
    return versions


def limit_memory(memory: str, device: torch.device) -> None:
    """Let torch's allocator reserve no more than `memory` on this device; empty: as much as there is.

    Beyond it an allocation fails as on a full GPU, after the allocator has given back what no tensor uses. Windows of
    symmetric memory and the CUDA context are outside the allocator, and not limited. No effect on a CPU.
    """
    if device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(device).total_memory
    share = min(1.0, size_in_bytes(memory, "memory") / total) if memory else 1.0
    # Set even without a limit: one process may run several tasks, as tests do.
    torch.cuda.set_per_process_memory_fraction(share, device)
