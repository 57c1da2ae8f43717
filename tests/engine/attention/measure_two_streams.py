"""Milliseconds of a forward whose steps use one CUDA stream, and two, in turns; for a GPU, no test.

python -m tests.engine.attention.measure_two_streams                                  # one GPU, peers stood in for
torchrun --nproc-per-node 2 -m tests.engine.attention.measure_two_streams             # the ranks of several GPUs
"""

from __future__ import annotations

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
from tests.engine.attention.test_two_streams import RANKS, PeersHere, context
from tests.plans import plan_attention

LENGTHS, HEADS, KV_HEADS, HEAD_DIM = (16384, 65536, 131072), 32, 8, 128
ROUNDS = 10


def forward_of(seq_len: int, streams: int, cp: ContextParallel, peers: bool, schedule: str) -> Callable[[], object]:
    """One forward; without `peers` the other ranks' chunks are copies on this GPU."""
    device, tokens = torch.device("cuda", torch.cuda.current_device()), seq_len // cp.size
    torch.manual_seed(cp.rank)
    shards = [
        torch.randn(1, tokens, n, HEAD_DIM, device=device, dtype=torch.bfloat16) for n in (HEADS, KV_HEADS, KV_HEADS)
    ]
    exchange = "relay" if schedule == "ring" else "auto"
    choices = {"schedule": schedule, "exchange": exchange, "backward": "key_value", "lse_gradient": False}
    plan = plan_attention(*shards[:2], mask=Causal(), cp=cp, forward_streams=streams, **choices)
    if not peers:
        assert isinstance(plan, RingPlan)
        plan = replace(plan, comms=RingComms(PeersHere([(shards[1], shards[2])] * RANKS, cp.rank)))
    return lambda: plan.forward(*shards, save=False)


def milliseconds(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    peers = "RANK" in os.environ
    if peers:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    cp = ContextParallel(layout="zigzag") if peers else context(RANKS - 1)
    for schedule in ("ring", "all_gather") if peers else ("ring",):
        for seq_len in LENGTHS:
            works = {streams: forward_of(seq_len, streams, cp, peers, schedule) for streams in (1, 2)}
            times: dict[int, list[float]] = {1: [], 2: []}
            for index in range(ROUNDS + 2):
                for streams, work in works.items():
                    took = milliseconds(work)
                    if index >= 2:  # after compilation
                        times[streams].append(took)
            one, two = (statistics.median(times[streams]) for streams in (1, 2))
            if cp.rank == 0 or not peers:
                print(f"{schedule} {seq_len}: one stream {one:.3f} ms, two {two:.3f} ms, {one / two:.3f} x", flush=True)
    if peers:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
