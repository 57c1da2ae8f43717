"""What the host does in a forward and a backward of attention by copy engine, counted on CPU ranks. Not a test:

    python -m tests.engine.attention.measure_host_calls              # four ranks, one call of each schedule
    python -m tests.engine.attention.measure_host_calls --ranks 2

The ranks are those of `tests.engine.attention.comm.symm_mem.node_on_host`: the code is the one that drives GPUs, and
rank 0 counts its calls of the driver, of streams and events, and of torch, in a call whose plan, slots and views exist.
The calls of the engine's functions are cProfile's. Kernels cost nothing here: what FlashAttention-4 does in Python is
not among the counts.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import pstats
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import engine
from engine import ContextParallel
from engine.attention.kernels import BackwardInputs
from engine.attention.masks import Causal
from engine.attention.op import run_attention
from tests.engine.attention.comm.symm_mem.node_on_host import become_a_gpu, by_copy_engine, calls
from tests.plans import plan_attention
from tests.ranks import run_on_ranks

SCHEDULES = (
    {"schedule": "ulysses", "num_head_chunks": 1},
    {"schedule": "ulysses", "num_head_chunks": 2},
    {"schedule": "ring", "backward": "query"},
    {"schedule": "ring", "backward": "key_value"},
)
TOKENS, HEADS, HEAD_DIM = 32, 32, 16  # of a rank: so few that copies take next to nothing
PROFILED = 20  # calls
ENGINE = str(Path(engine.__file__).parent)
ALLOCATIONS = ("empty", "zeros", "new_", "full")


class StandIn:
    """A kernel that costs nothing: it returns memory of the right shapes."""

    name = "stand_in"
    writes_input_dtype = takes_delta = takes_output = True

    def forward(self, q, k, v, band, scale) -> tuple[torch.Tensor, torch.Tensor]:
        operations["attention kernel"] += 1
        return torch.ones(q.shape, dtype=q.dtype), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    def backward(self, given: BackwardInputs, band, scale, deterministic) -> tuple[torch.Tensor, ...]:
        operations["attention kernel"] += 1
        return tuple(torch.ones(each.shape, dtype=each.dtype) for each in (given[0], given[4], given[5]))


operations: collections.Counter[str] = collections.Counter()


class Counting(TorchDispatchMode):
    """Counts torch's operations: views, allocations, and others, which a GPU would launch a kernel or a copy for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        aliases = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        kind = "view" if aliases else "allocation" if name.startswith(ALLOCATIONS) else "other torch operation"
        operations[kind] += 1
        return func(*args, **(kwargs or {}))


def counted(choices: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By pass: the counts of one call on this rank."""
    become_a_gpu()
    cp = ContextParallel()
    q, k, v, dout = (torch.randn(1, TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(4))
    plan = plan_attention(q, k, mask=Causal(), cp=cp, kernel="reference", lse_gradient=False, **choices)
    plan = by_copy_engine(with_kernel(plan), dist.group.WORLD)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]

    def forward() -> torch.Tensor:
        return run_attention(plan, *leaves)

    def backward(out: torch.Tensor) -> None:
        torch.autograd.grad(out, leaves, dout)

    for _ in range(3):
        backward(forward())
    found: dict[str, dict[str, float]] = {}
    out: list[torch.Tensor] = []
    passes: dict[str, Callable[[], Any]] = {
        "forward": lambda: out.append(forward()),
        "backward": lambda: backward(out.pop()),
    }
    for name, work in passes.items():
        calls.clear()
        operations.clear()
        with Counting():
            work()
        found[name] = dict(calls + operations)
    profiles = {name: cProfile.Profile() for name in passes}
    for _ in range(PROFILED):
        for name, work in passes.items():
            dist.barrier()
            profiles[name].runcall(work)
    for name, profile in profiles.items():
        functions = sum(
            count
            for (path, _line, _function), (count, *_) in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
            if path.startswith(ENGINE)
        )
        found[name]["functions of the engine"] = functions / PROFILED
    return found


def with_kernel(plan: Any) -> Any:
    """The plan with a kernel that costs nothing."""
    if hasattr(plan, "inner"):
        return replace(plan, inner=replace(plan.inner, kernel=StandIn()))
    return replace(plan, kernel=StandIn())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    tables = [run_on_ranks(ranks, counted, choices)[0] for choices in SCHEDULES]
    names = sorted({name for table in tables for row in table.values() for name in row})
    titles = [" ".join(str(v) for v in choices.values()) for choices in SCHEDULES]
    print(f"| forward / backward of rank 0 of {ranks} | {' | '.join(titles)} |")
    print("|---" * (len(titles) + 1) + "|")
    for name in names:
        cells = (f"{table['forward'].get(name, 0):.0f} / {table['backward'].get(name, 0):.0f}" for table in tables)
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
