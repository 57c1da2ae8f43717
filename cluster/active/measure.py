"""Speeds of a node's devices, each alone and together: matrix product, copies, all-reduce; and of two nodes' exchange.

Imports torch, so only the worker imports it.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from cluster.active.measurement import SIZES, Device, Sizes

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


def _synchronize(used: list[torch.device]) -> None:
    """Wait for the work started on these devices."""
    for device in used:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _seconds(work: Callable[[], object], used: list[torch.device], sizes: Sizes) -> float:
    """Median over blocks of the seconds one call takes."""
    return _median(lambda: _block_seconds(work, used, sizes), sizes)


def _median(block: Callable[[], float], sizes: Sizes) -> float:
    """Of all blocks but the first, which warms up."""
    return max(statistics.median([block() for _ in range(sizes.blocks + 1)][1:]), 1e-9)


def _block_seconds(work: Callable[[], object], used: list[torch.device], sizes: Sizes) -> float:
    _synchronize(used)
    started = time.perf_counter()
    for _ in range(sizes.repeats):
        work()
    _synchronize(used)
    return (time.perf_counter() - started) / sizes.repeats


@dataclass(frozen=True, kw_only=True, slots=True)
class _DeviceRanks:
    """Processes that measure together, one for each device, of one node or of two."""

    kind: Device
    operation: Literal["all_reduce", "exchange"]
    store: tuple[str, str, int]  # "file", its path and 0; or "tcp", address and port of a store that listens
    ranks: int
    seconds: float  # until a collective must have ended

    def speeds(self, first_rank: int, local_ranks: int) -> list[float]:
        """GB/s of every rank of this node. Raises RuntimeError with the message of the first rank that fails."""
        if local_ranks == 1:
            return [self.rank(first_rank, 0)]
        # Ranks are forked from a process that has imported torch and nothing else: one import instead of one for each.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])
        answers: multiprocessing.Queue[float | str] = context.Queue()
        processes = [
            context.Process(target=_report, args=(answers, self, first_rank + local, local), daemon=True)
            for local in range(local_ranks)
        ]
        for process in processes:
            process.start()
        try:
            found: list[float] = []
            ends_at = time.monotonic() + self.seconds
            while len(found) < local_ranks:
                try:
                    answer = answers.get(timeout=max(0.1, ends_at - time.monotonic()))
                except queue.Empty:
                    missing = local_ranks - len(found)
                    raise RuntimeError(f"{missing} ranks gave no answer within {self.seconds:g} s") from None
                if isinstance(answer, str):
                    raise RuntimeError(answer)
                found.append(answer)
            return found
        finally:
            for process in processes:
                process.terminate()
                process.join(5)

    def rank(self, rank: int, local: int) -> float:
        """One rank's GB/s: bus bandwidth of an all-reduce, or bytes sent to and received from its counterpart."""
        form, place, port = self.store
        timeout = timedelta(seconds=self.seconds)
        opened: dist.Store = (
            dist.FileStore(place, self.ranks)
            if form == "file"
            else dist.TCPStore(place, port, is_master=False, timeout=timeout)
        )
        device = torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", local)
        if self.kind == "cuda":
            torch.cuda.set_device(device)
        backend = "gloo" if self.kind == "cpu" else "nccl"
        dist.init_process_group(backend, store=opened, rank=rank, world_size=self.ranks, timeout=timeout)
        try:
            if self.operation == "all_reduce":
                return _all_reduce(device, self.ranks, SIZES[self.kind])
            return _exchange(device, rank, self.ranks, SIZES[self.kind])
        finally:
            dist.destroy_process_group()


def _report(answers: multiprocessing.Queue[float | str], group: _DeviceRanks, rank: int, local: int) -> None:
    try:
        answers.put(group.rank(rank, local))
    except Exception as error:  # noqa: BLE001 - any failure of a rank is a measurement that says why
        answers.put(f"rank {rank}: {' '.join(str(error).split())[:300] or type(error).__name__}")


def all_reduce_gb_per_second(kind: Device, seconds: float) -> float | None:
    """Bus bandwidth, 2 (n - 1) / n of the bytes over the time, of all devices of this node; None for one device.

    Source: NCCL tests, doc/PERFORMANCE.md.
    """
    count = len(devices(kind))
    if count < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        store = ("file", os.path.join(folder, "store"), 0)
        return min(
            _DeviceRanks(kind=kind, operation="all_reduce", store=store, ranks=count, seconds=seconds).speeds(0, count)
        )


def exchange_gb_per_second(kind: Device, address: str, port: int, node: int, seconds: float) -> float:
    """Bytes each way between two nodes, all their devices at once, each with its counterpart: the sum in GB/s.

    `node` is 0 or 1; the store must already listen at `address` and `port`.
    """
    local = torch.cuda.device_count() if kind == "cuda" else EMULATED - 1
    group = _DeviceRanks(
        kind=kind, operation="exchange", store=("tcp", address, port), ranks=2 * local, seconds=seconds
    )
    return sum(group.speeds(node * local, local))


def _all_reduce(device: torch.device, ranks: int, sizes: Sizes) -> float:
    content = torch.ones(sizes.all_reduce_bytes // 4, device=device)
    seconds = _slowest_seconds(lambda: dist.all_reduce(content.fill_(1.0)), device, sizes)
    if content[0].item() != ranks:
        raise RuntimeError(f"an all-reduce of ones over {ranks} ranks gave {content[0].item():g}; do not use this node")
    return 2 * (ranks - 1) / ranks * sizes.all_reduce_bytes / seconds / 1e9


def _exchange(device: torch.device, rank: int, ranks: int, sizes: Sizes) -> float:
    peer = (rank + ranks // 2) % ranks
    sent = torch.full((sizes.pair_bytes,), rank % 251, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def exchange() -> None:
        operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    seconds = _slowest_seconds(exchange, device, sizes)
    if not bool((received == peer % 251).all().item()):
        raise RuntimeError(f"rank {rank} received other bytes than rank {peer} sent; do not use these nodes together")
    return 2 * sizes.pair_bytes / seconds / 1e9


def _slowest_seconds(work: Callable[[], object], device: torch.device, sizes: Sizes) -> float:
    """Median over blocks of the seconds one call takes on the slowest rank; the first block warms up."""

    def block() -> float:
        dist.barrier()
        slowest = torch.tensor([_block_seconds(work, [device], sizes)], device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest.item())

    return _median(block, sizes)
