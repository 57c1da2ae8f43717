"""A forward whose steps alternate over two streams gives the bits of one stream, and dense attention's numbers.

On one GPU, or on a CPU where the streams are one, a rank's ring runs beside a stand-in for its peers: chunks arrive by
copies on a stream of their own, as NCCL's would. On several GPUs the ranks are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine import ContextParallel
from engine.attention.algorithms.ring import RingPlan
from engine.attention.comm.exchange import ChunkSpec, RemoteChunk, RingComms
from engine.attention.comm_plan import ChunkRanges
from engine.attention.masks import Causal
from engine.attention.op import run_attention
from engine.attention.reference import dense_attention
from engine.cuda.alternate import ONE_STREAM, TwoStreams, streams_of
from tests.plans import plan_attention
from tests.ranks import run_on_ranks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICE = torch.device("cuda" if GPUS else "cpu")
DTYPE = torch.bfloat16 if GPUS else torch.float64
TOLERANCE = 8e-3 if GPUS else 1e-12
RANKS, SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM = 4, 8192 if GPUS else 64, 8, 4, 64 if GPUS else 8
CALLS = 20 if GPUS else 2  # in a row, without waiting: memory is used again and again


class PeersHere:
    """The inner ring of one rank whose peers' chunks are on this device."""

    def __init__(self, shards: list[tuple[Tensor, Tensor]], rank: int) -> None:
        self._shards, self._rank = shards, rank
        self._wire = torch.cuda.Stream() if GPUS else None

    def inner_ring(self, held: RemoteChunk, spec: ChunkSpec, ranges: ChunkRanges) -> Iterator[RemoteChunk]:
        for step in range(1, RANKS):
            receive = self._post(self._shards[(self._rank - step) % RANKS])
            yield held
            held = RemoteChunk(receive(), spec.token_dims)
        yield held

    def grad_return(self, comm_dtype: torch.dtype | None, ranges: ChunkRanges) -> None:
        raise AssertionError("a forward returns no gradients")

    def _post(self, sent: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
        received = tuple(torch.empty_like(tensor) for tensor in sent)
        if self._wire is None:
            for mine, theirs in zip(received, sent, strict=True):
                mine.copy_(theirs)
            return lambda: received
        self._wire.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._wire):
            for mine, theirs in zip(received, sent, strict=True):
                mine.copy_(theirs)  # without a mark, as the memory of real transfers
            arrived = self._wire.record_event()

        def receive() -> tuple[Tensor, ...]:
            torch.cuda.current_stream().wait_event(arrived)
            return received

        return receive


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(1, SEQ_LEN, heads, HEAD_DIM, dtype=torch.float64).to(DEVICE, DTYPE)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def context(rank: int) -> ContextParallel:
    """One of four ranks, without the others."""
    cp = ContextParallel.single("zigzag")
    cp.size, cp.rank, cp.node_size = RANKS, rank, RANKS
    return cp


@pytest.mark.parametrize("rank", range(RANKS))
def test_alternating_streams_give_the_bits_of_one_and_dense_numbers(rank: int) -> None:
    q, k, v = inputs()
    shards = [tuple(context(each).shard(t, dim=1) for t in (q, k, v)) for each in range(RANKS)]
    plan = plan_attention(
        *shards[rank][:2], mask=Causal(), cp=context(rank), schedule="ring", exchange="relay", forward_streams=2
    )
    assert isinstance(plan, RingPlan)
    assert isinstance(plan.streams, TwoStreams) == bool(GPUS)
    plan = replace(plan, comms=RingComms(PeersHere([each[1:] for each in shards], rank)))
    one = replace(plan, streams=ONE_STREAM)
    expected, expected_lse, _ = one.forward(*shards[rank], save=False)
    found = [plan.forward(*shards[rank], save=False)[:2] for _ in range(CALLS)]
    for out, lse in found:
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
    dense, _ = dense_attention(*(t.double() for t in (q, k, v)), Causal())
    truth = context(rank).shard(dense, dim=1)
    assert ((expected.double() - truth).abs().max() / truth.abs().max()).item() < TOLERANCE


def test_a_cpu_has_one_stream_whatever_is_asked() -> None:
    assert streams_of(2, torch.device("cpu")) is ONE_STREAM
    q, k, _ = (t.cpu().float() for t in inputs())
    with pytest.raises(ValueError, match="forward_streams is 3; give 1 or 2"):
        plan_attention(q, k, mask=Causal(), cp=ContextParallel.single(), forward_streams=3)


def differing_bits(schedule: str, calls: int) -> float:
    """The largest difference between the outputs of one stream and of two, over calls in a row."""
    device = torch.device("cuda", torch.cuda.current_device())
    cp = ContextParallel(layout="zigzag")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4096, n, 128, device=device, dtype=torch.bfloat16) for n in (16, 8, 8))
    one, two = (
        plan_attention(
            q, k, mask=Causal(), cp=cp, schedule=schedule, backward="key_value",
            exchange="relay" if schedule == "ring" else "auto", grad_comm_dtype="input", forward_streams=streams,
        )
        for streams in (1, 2)
    )  # fmt: skip
    expected = run_attention(one, q, k, v)
    outs = [run_attention(two, q, k, v) for _ in range(calls)]
    return max((out - expected).abs().max().item() for out in outs)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("schedule", ["ring", "all_gather"])
def test_ranks_on_gpus_give_the_same_bits_on_two_streams(schedule: str) -> None:
    assert run_on_ranks(GPUS, differing_bits, schedule, 20, backend="nccl") == [0.0] * GPUS
