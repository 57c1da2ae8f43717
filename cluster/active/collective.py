"""Speeds between processes: all-reduce within a node, send and receive between two nodes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from cluster.active.kernels import EMULATED, devices, synchronize
from cluster.active.measurement import SIZES, Device

Operation = Literal["all_reduce", "exchange"]


def all_reduce_gb_per_second(kind: Device, seconds: float) -> float | None:
    """Bus bandwidth, 2 (n - 1) / n of the bytes over the time, of all devices of this node; None for one device.

    Source: NCCL tests, doc/PERFORMANCE.md.
    """
    count = len(devices(kind))
    if count < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        store = ("file", os.path.join(folder, "store"), 0)
        return min(_run_ranks(kind, "all_reduce", store, first_rank=0, local_ranks=count, ranks=count, seconds=seconds))


def exchange_gb_per_second(kind: Device, address: str, port: int, node: int, local_ranks: int, seconds: float) -> float:
    """Bytes each way between two nodes, all their devices at once, each with its counterpart: the sum in GB/s.

    `node` is 0 or 1; the store must already listen at `address` and `port`.
    """
    speeds = _run_ranks(
        kind,
        "exchange",
        ("tcp", address, port),
        first_rank=node * local_ranks,
        local_ranks=local_ranks,
        ranks=2 * local_ranks,
        seconds=seconds,
    )
    return sum(speeds)


def ranks_per_node(kind: Device) -> int:
    """Processes of a node in an exchange: one for each device."""
    return torch.cuda.device_count() if kind == "cuda" else EMULATED - 1


def _run_ranks(
    kind: Device,
    operation: Operation,
    store: tuple[str, str, int],
    *,
    first_rank: int,
    local_ranks: int,
    ranks: int,
    seconds: float,
) -> list[float]:
    """GB/s of every local rank. Raises RuntimeError with the message of the first rank that fails."""
    if local_ranks == 1:
        return [_rank(kind, operation, store, first_rank, 0, ranks, seconds)]
    # Ranks are forked from a process that has imported torch and nothing else: one import instead of one for each.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    answers: multiprocessing.Queue[float | str] = context.Queue()
    processes = [
        context.Process(
            target=_report,
            args=(answers, kind, operation, store, first_rank + local, local, ranks, seconds),
            daemon=True,
        )
        for local in range(local_ranks)
    ]
    for process in processes:
        process.start()
    try:
        found: list[float] = []
        ends_at = time.monotonic() + seconds
        while len(found) < local_ranks:
            try:
                answer = answers.get(timeout=max(0.1, ends_at - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"{local_ranks - len(found)} ranks gave no answer within {seconds:g} s") from None
            if isinstance(answer, str):
                raise RuntimeError(answer)
            found.append(answer)
        return found
    finally:
        for process in processes:
            process.terminate()
            process.join(5)


def _report(
    answers: multiprocessing.Queue[float | str],
    kind: Device,
    operation: Operation,
    store: tuple[str, str, int],
    rank: int,
    local: int,
    ranks: int,
    seconds: float,
) -> None:
    try:
        answers.put(_rank(kind, operation, store, rank, local, ranks, seconds))
    except Exception as error:  # noqa: BLE001 - any failure of a rank is a measurement that says why
        answers.put(f"rank {rank}: {' '.join(str(error).split())[:300] or type(error).__name__}")


def _rank(
    kind: Device, operation: Operation, store: tuple[str, str, int], rank: int, local: int, ranks: int, seconds: float
) -> float:
    """One rank's GB/s: bus bandwidth of an all-reduce, or bytes sent to and received from its counterpart."""
    form, place, port = store
    timeout = timedelta(seconds=seconds)
    opened: dist.Store = (
        dist.FileStore(place, ranks) if form == "file" else dist.TCPStore(place, port, is_master=False, timeout=timeout)
    )
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", local)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if kind == "cpu" else "nccl", store=opened, rank=rank, world_size=ranks, timeout=timeout
    )
    try:
        return _all_reduce(device, ranks) if operation == "all_reduce" else _exchange(device, rank, ranks)
    finally:
        dist.destroy_process_group()


def _all_reduce(device: torch.device, ranks: int) -> float:
    sizes = SIZES["cuda" if device.type == "cuda" else "cpu"]
    content = torch.ones(sizes.all_reduce_bytes // 4, device=device)
    seconds = _slowest_seconds(lambda: dist.all_reduce(content.fill_(1.0)), device)
    if content[0].item() != ranks:
        raise RuntimeError(f"an all-reduce of ones over {ranks} ranks gave {content[0].item():g}; do not use this node")
    return 2 * (ranks - 1) / ranks * sizes.all_reduce_bytes / seconds / 1e9


def _exchange(device: torch.device, rank: int, ranks: int) -> float:
    sizes = SIZES["cuda" if device.type == "cuda" else "cpu"]
    peer = (rank + ranks // 2) % ranks
    sent = torch.full((sizes.pair_bytes,), rank % 251, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def exchange() -> None:
        operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    seconds = _slowest_seconds(exchange, device)
    if not bool((received == peer % 251).all().item()):
        raise RuntimeError(f"rank {rank} received other bytes than rank {peer} sent; do not use these nodes together")
    return 2 * sizes.pair_bytes / seconds / 1e9


def _slowest_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median over blocks of the seconds one call takes on the slowest rank; the first block warms up."""
    sizes = SIZES["cuda" if device.type == "cuda" else "cpu"]
    blocks = []
    for _ in range(sizes.blocks + 1):
        dist.barrier()
        synchronize([device])
        started = time.perf_counter()
        for _ in range(sizes.repeats):
            work()
        synchronize([device])
        slowest = torch.tensor([(time.perf_counter() - started) / sizes.repeats], device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        blocks.append(float(slowest.item()))
    return max(statistics.median(blocks[1:]), 1e-9)
