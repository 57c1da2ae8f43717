"""Speeds of the devices of one node: matrix product, copies within, to, from and between devices."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

from cluster.active.measurement import Device, Sizes

EMULATED = 2  # a CPU counts as this many devices, so that every path runs without a GPU


def devices(kind: Device) -> list[torch.device]:
    """The devices to measure."""
    if kind == "cpu":
        return [torch.device("cpu")] * EMULATED
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def gemm_tflops(device: torch.device, sizes: Sizes) -> float:
    """Square bf16 matrix product (fp32 on a CPU), in TFLOP/s."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    one = torch.randn(sizes.gemm, sizes.gemm, device=device, dtype=dtype)
    other = torch.randn(sizes.gemm, sizes.gemm, device=device, dtype=dtype)
    out = torch.empty_like(one)
    seconds = _seconds(lambda: torch.matmul(one, other, out=out), [device], sizes)
    return 2 * sizes.gemm**3 / seconds / 1e12


def hbm_gb_per_second(device: torch.device, sizes: Sizes) -> float:
    """Copy within the device; every byte is read and written."""
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / _seconds(lambda: target.copy_(source), [device], sizes) / 1e9


def host_gb_per_second(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """To the device and from it, with pinned host memory."""
    host = torch.empty(sizes.copy_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device)
    to_device = _seconds(lambda: there.copy_(host, non_blocking=True), [device], sizes)
    from_device = _seconds(lambda: host.copy_(there, non_blocking=True), [device], sizes)
    return sizes.copy_bytes / to_device / 1e9, sizes.copy_bytes / from_device / 1e9


def peer_gb_per_second(all_devices: list[torch.device], sizes: Sizes) -> dict[str, float]:
    """From every device to every other one, one pair after the other."""
    speeds = {}
    for one, other in itertools.permutations(range(len(all_devices)), 2):
        source = torch.empty(sizes.peer_bytes, dtype=torch.uint8, device=all_devices[one])
        target = torch.empty(sizes.peer_bytes, dtype=torch.uint8, device=all_devices[other])

        def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> object:
            return target.copy_(source, non_blocking=True)

        seconds = _seconds(copy, [all_devices[one], all_devices[other]], sizes)
        speeds[f"{one}-{other}"] = sizes.peer_bytes / seconds / 1e9
    return speeds


def synchronize(used: list[torch.device]) -> None:
    """Wait for the work started on these devices."""
    for device in used:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _seconds(work: Callable[[], object], used: list[torch.device], sizes: Sizes) -> float:
    """Median over blocks of the seconds one call takes; the first block warms up and is not counted."""
    blocks = []
    for _ in range(sizes.blocks + 1):
        synchronize(used)
        started = time.perf_counter()
        for _ in range(sizes.repeats):
            work()
        synchronize(used)
        blocks.append((time.perf_counter() - started) / sizes.repeats)
    return max(statistics.median(blocks[1:]), 1e-9)
