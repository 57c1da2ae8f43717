"""Milliseconds of short attention over the GPUs of one node, by schedule; for GPUs, no test.

    torchrun --nproc-per-node 4 -m tests.engine.attention.measure_passes                 # 16K and 32K tokens, all ways
    torchrun --nproc-per-node 2 -m tests.engine.attention.measure_passes --kv-heads 8 --tokens 16384

bf16, causal, 32 query heads x 128, forward and backward. Each figure is the median of the slowest rank over rounds in
which every way takes its turn. `alone`: all ranks start together while the GPUs are idle, as trials do. `in a row`: of
five calls without a wait, as layers of a model, one of them. `host`: until this rank's host has launched a call. The
ideal is the whole problem, on each of the GPUs at once, divided by their number. Before timing, each way's results
are compared with those of the first.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from engine import ContextParallel, prepare_attention

HEADS, HEAD_DIM, IN_A_ROW = 32, 128, 5
Step = Callable[[], tuple[Tensor, ...]]


def ways(size: int, kv_heads: int) -> dict[str, dict[str, object]]:
    """Settings of `prepare_attention` by name."""
    found: dict[str, dict[str, object]] = {}
    for side in ("query", "key_value"):
        found[f"ring {side}"] = {"schedule": "ring", "exchange": "copy_engine", "backward": side}
    for chunks in (1, 2, 4):
        if kv_heads // size % chunks == 0:
            found[f"ulysses {chunks}"] = {"schedule": "ulysses", "num_head_chunks": chunks}
    return found


def step_of(cp: ContextParallel, tokens: int, kv_heads: int, **choices: object) -> Step:
    """One forward and backward, with the same inputs whatever the choices."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(cp.rank)
    q, k, v, dout = (
        torch.randn(1, tokens // cp.size, heads, HEAD_DIM, device=device, generator=generator).bfloat16()
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    )
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    attend = prepare_attention(q, k, cp=cp, **choices)  # type: ignore[arg-type]

    def step() -> tuple[Tensor, ...]:
        out: Tensor = attend(*leaves)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    return step


def milliseconds(step: Step, calls: int, flush: Tensor) -> tuple[float, float]:
    """(of one of `calls` calls on the slowest rank, of the host until a call is launched)."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    dist.barrier()
    flush.zero_()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    start.record()
    for _ in range(calls):
        step()
    end.record()
    host = (time.perf_counter() - begun) / calls
    torch.cuda.synchronize()
    slowest = torch.tensor([start.elapsed_time(end) / calls, 1e3 * host], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    taken, launched = slowest.tolist()
    return taken, launched


def worst_difference(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Of all ranks, relative."""
    differences = [((one - other).norm() / other.norm()).item() for one, other in zip(found, expected, strict=True)]
    worst = torch.tensor(max(differences), device="cuda")
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[16384, 32768])
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    cp, alone = ContextParallel(), ContextParallel.single(layout="contiguous")
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    for tokens in chosen.tokens:
        steps = {
            name: step_of(cp, tokens, chosen.kv_heads, **choices)
            for name, choices in ways(cp.size, chosen.kv_heads).items()
        }
        expected = next(iter(steps.values()))()
        differences = {}
        for name, step in steps.items():
            for _ in range(2):
                found = step()
            differences[name] = worst_difference(found, expected)
        whole = step_of(alone, tokens, chosen.kv_heads)
        whole()
        steps["whole problem"] = whole
        times: dict[str, list[tuple[float, ...]]] = {name: [] for name in steps}
        for index in range(chosen.rounds):
            names = list(steps)
            for name in (*names[index % len(names) :], *names[: index % len(names)]):
                one, host = milliseconds(steps[name], 1, flush)
                times[name].append((one, milliseconds(steps[name], IN_A_ROW, flush)[0], host))
        if cp.rank == 0:
            ideal = statistics.median(one for one, *_ in times.pop("whole problem")) / cp.size
            print(f"\n{tokens} tokens, {cp.size} GPUs, {HEADS}:{chosen.kv_heads} heads; ideal {ideal:.3f} ms")
            print("| way | alone, ms | share of the ideal | in a row, ms | host, ms | difference |")
            print("|---|---|---|---|---|---|")
            for name, rows in times.items():
                one, row, host = (statistics.median(column) for column in zip(*rows, strict=True))
                print(
                    f"| {name} | {one:.3f} | {ideal / one:.1%} | {row:.3f} | {host:.3f} | {differences[name]:.1e} |",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
