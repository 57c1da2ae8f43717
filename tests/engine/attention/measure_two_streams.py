"""Milliseconds of attention whose steps use one CUDA stream, and two, in turns; for a GPU, no test.

python -m tests.engine.attention.measure_two_streams                                  # one GPU, peers stood in for
torchrun --nproc-per-node 2 -m tests.engine.attention.measure_two_streams             # the ranks of several GPUs

On one GPU: forwards of a ring by relay. On several: forwards of a ring by relay and of gathered keys, and forward and
backward of a ring by copy engine; the slowest rank's. `alone`: the GPUs are idle when a call begins, as in trials.
`in a row`: of five calls without a wait, as layers of a model, one of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from engine import ContextParallel
from engine.attention.algorithms.ring import RingPlan
from engine.attention.comm.exchange import RingComms
from engine.attention.masks import Causal
from engine.attention.op import run_attention
from engine.attention.resolve import plan_attention
from engine.cuda.alternate import streams_of
from tests.engine.attention.test_two_streams import RANKS, PeersHere, context

HEADS, HEAD_DIM, ROUNDS, IN_A_ROW = 32, 128, 10, 5
Call = Callable[[], object]


def shards_of(seq_len: int, cp: ContextParallel, kv_heads: int) -> list[torch.Tensor]:
    """q, k, v and dout of this rank."""
    torch.manual_seed(cp.rank)
    device = torch.device("cuda", torch.cuda.current_device())
    return [
        torch.randn(1, seq_len // cp.size, heads, HEAD_DIM, device=device, dtype=torch.bfloat16)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    ]


def forward_of(seq_len: int, streams: int, cp: ContextParallel, kv_heads: int, peers: bool, schedule: str) -> Call:
    """One forward; without `peers` the other ranks' chunks are copies on this GPU."""
    *shards, _ = shards_of(seq_len, cp, kv_heads)
    choices = {"schedule": schedule, "exchange": "relay", "backward": "key_value", "lse_gradient": False}
    plan = plan_attention(*shards[:2], mask=Causal(), cp=cp, forward_streams=streams, **choices)
    if not peers:
        assert isinstance(plan, RingPlan)
        plan = replace(plan, comms=RingComms(PeersHere([(shards[1], shards[2])] * RANKS, cp.rank)))
    return lambda: plan.forward(*shards, save=False)


def ring_by_copy_engine(seq_len: int, streams: int, cp: ContextParallel, kv_heads: int, backward: bool) -> Call:
    """One forward, or one forward and its backward."""
    *shards, dout = shards_of(seq_len, cp, kv_heads)
    leaves = [shard.requires_grad_() for shard in shards]
    plan = plan_attention(
        *shards[:2], mask=Causal(), cp=cp, schedule="ring", exchange="copy_engine", lse_gradient=False
    )
    assert isinstance(plan, RingPlan)
    those = streams_of(streams, dout.device)
    plan = replace(plan, streams=those, backward_streams=those)

    def both() -> object:
        return torch.autograd.grad(run_attention(plan, *leaves), leaves, dout)

    return both if backward else lambda: plan.forward(*(leaf.detach() for leaf in leaves), save=False)


def milliseconds(call: Call, times: int) -> float:
    """Of one of `times` calls without a wait, on the slowest rank."""
    if dist.is_initialized():
        dist.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    took = torch.tensor(start.elapsed_time(end) / times, device="cuda")
    if dist.is_initialized():
        dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768, 65536, 131072])
    parser.add_argument("--kv-heads", type=int, default=32)
    given = parser.parse_args()
    peers = "RANK" in os.environ
    if peers:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    cp = ContextParallel(layout="zigzag") if peers else context(RANKS - 1)
    names = ["ring by relay, forward"]
    if peers:
        names += ["all_gather, forward", "ring by copy engine, forward", "ring by copy engine, both"]
    for seq_len in given.tokens:
        for name in names:
            calls: dict[int, Call] = {}
            for streams in (1, 2):
                if "copy engine" in name:
                    calls[streams] = ring_by_copy_engine(seq_len, streams, cp, given.kv_heads, name.endswith("both"))
                else:
                    schedule = "all_gather" if "all_gather" in name else "ring"
                    calls[streams] = forward_of(seq_len, streams, cp, given.kv_heads, peers, schedule)
            times: dict[tuple[int, int], list[float]] = {}
            for index in range(ROUNDS + 2):
                for streams, call in calls.items():
                    for count in (1, IN_A_ROW):
                        took = milliseconds(call, count)
                        if index >= 2:  # after compilation
                            times.setdefault((streams, count), []).append(took)
            if cp.rank == 0 or not peers:
                shown = []
                for how, count in (("alone", 1), ("in a row", IN_A_ROW)):
                    one, two = (statistics.median(times[streams, count]) for streams in (1, 2))
                    shown.append(f"{how} {one:.3f} ms on one stream, {two:.3f} on two ({one / two:.3f} x)")
                print(f"{name}, {seq_len} tokens: {'; '.join(shown)}", flush=True)
    if peers:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
