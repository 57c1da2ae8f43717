"""The library's call against dense attention: every argument that changes how it is computed, on the ranks you have.

    torchrun --nproc-per-node 4 examples/check_burst_attn.py

Prints one line per case and exits with 1 when one is wrong. In bf16 (on GPUs) a case may err as much as a dense bf16
run of the same problem does, and half as much again; in fp32 (on a CPU) by 1e-5.
"""

from __future__ import annotations

import itertools
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from burst import ContextParallel
from engine.attention.masks import Causal, Full
from engine.attention.reference import dense_attention
from engine.burst_attn import burst_attn_func
from engine.measurement import relative_errors

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
NAMES = ("out", "dq", "dk", "dv")


def dense(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """out, dq, dk, dv of the whole sequence on one device, in the inputs' dtype."""
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (q, k, v))
    out, _lse = dense_attention(q, k, v, Causal() if causal else Full())
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))


def double_groups(cp: ContextParallel) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """(ranks of a node, same places of all nodes) as if two ranks made a node; None where that is no double ring."""
    if cp.size < 4 or cp.size % 2:
        return None
    nodes = [dist.new_group([first, first + 1]) for first in range(0, cp.size, 2)]
    columns = [dist.new_group(list(range(slot, cp.size, 2))) for slot in range(2)]
    return nodes[cp.rank // 2], columns[cp.rank % 2]


def check(device: torch.device, tokens_per_rank: int = 256) -> tuple[int, int]:
    """(cases compared, cases that were wrong). Collective when distributed."""
    cp = ContextParallel(layout="zigzag")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(1, tokens_per_rank * cp.size, heads, HEAD_DIM, generator=generator).to(device, dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    nested = double_groups(cp)
    compared = wrong = 0
    for causal in (False, True):
        truth = dense(*(tensor.double() for tensor in whole), causal)
        one_device = relative_errors(dense(*whole, causal), truth)
        allowed = [1.5 * error for error in one_device] if dtype == torch.bfloat16 else [1e-5] * 4
        for flash, query_side, deterministic, groups in itertools.product(
            ("cuda", "triton", None), (True, False), (False, True), (None, nested) if nested else (None,)
        ):
            double = groups is not None
            case = f"{flash=} {causal=} optimize_bwd_comm={query_side} {deterministic=} double_group={double}"
            q, k, v, dout = (cp.shard(tensor) for tensor in whole)
            q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
            try:
                out = burst_attn_func(q, k, v, None, flash, causal, query_side, deterministic, double_group=groups)
            except ValueError as reason:
                say(cp, f"not here  {case}: {reason}")
                continue
            found = (out.detach(), *torch.autograd.grad(out, (q, k, v), dout))
            measured = relative_errors([cp.unshard(tensor) for tensor in found], truth)
            good = all(error <= limit for error, limit in zip(measured, allowed, strict=True))
            compared, wrong = compared + 1, wrong + (not good)
            figures = ", ".join(f"{name} {error:.1e}" for name, error in zip(NAMES, measured, strict=True))
            say(cp, f"{'ok       ' if good else 'WRONG    '} {case}: {figures}")
    return compared, wrong


def say(cp: ContextParallel, line: str) -> None:
    if cp.rank == 0:
        print(line)


def main() -> int:
    """Exit code: 0 when every case that can run here is right."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if device is not None else "gloo")
    compared, wrong = check(device or torch.device("cpu"))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{compared - wrong} of {compared} cases are right")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if wrong or not compared else 0


if __name__ == "__main__":
    sys.exit(main())
