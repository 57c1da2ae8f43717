"""Run a function on several ranks in real processes, gloo or NCCL, and hand back what each returned.

A fork server with torch and the engine preloaded starts the ranks, so a test pays for the imports once and no rank
inherits threads. A rank has the environment of its test.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.patience import AMPLE

_context = multiprocessing.get_context("forkserver")
# A rank imports by itself what is not named here: without those that a first call of attention or of a sharded model
# imports (torch._dynamo and torch.onnx among them), each rank of each test took half a second of processor time for it.
_context.set_forkserver_preload(
    [
        *("torch", "torch.distributed", "torch.distributed.fsdp", "torch._dynamo", "torch.onnx", "numpy.random"),
        *("engine.burst", "engine.attention.op", "engine.attention.prepared", "engine.tasks.train"),
        *("torch.distributed.tensor", "harness.spec.methods", "yaml", "pytest"),
    ]
)


def _rank_main(
    rank: int,
    world_size: int,
    backend: str,
    environment: dict[str, str],
    store: str,
    results: Any,
    fn: Callable[..., Any],
    args: tuple,
) -> None:
    os.environ |= environment  # that of the test, which the fork server began without
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=AMPLE),
    )
    try:
        dist.barrier()  # one that is done at once would close connections that others are still opening
        results.put((rank, fn(*args), None))
        if dist.is_initialized():
            dist.barrier()  # the same of groups that were made in between
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def run_on_ranks(world_size: int, fn: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """Results of `fn(*args)` on each of `world_size` ranks, torch.distributed initialised, with a GPU each under
    NCCL. Fails with the first rank's traceback. `fn` is a module-level function; results are plain values."""
    with tempfile.TemporaryDirectory() as folder:
        results = _context.SimpleQueue()
        processes = [
            _context.Process(
                target=_rank_main,
                args=(rank, world_size, backend, dict(os.environ), str(Path(folder, "store")), results, fn, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        values: dict[int, Any] = {}
        try:
            while len(values) < world_size:
                while results.empty():
                    for process in processes:
                        process.join(0.02)
                    if not any(process.is_alive() for process in processes) and results.empty():
                        raise AssertionError(f"ranks ended without a result: {[p.exitcode for p in processes]}")
                rank, value, failure = results.get()
                assert failure is None, f"rank {rank} failed:\n{failure}"
                values[rank] = value
            for process in processes:
                process.join(AMPLE)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [values[rank] for rank in range(world_size)]
