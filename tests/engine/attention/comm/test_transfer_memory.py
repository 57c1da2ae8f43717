"""Memory of transfers is held until they are waited for and free then: no mark of the process group keeps it longer."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine import ContextParallel
from engine.attention.accumulate.accumulators import tensor_specs
from engine.attention.comm import p2p
from engine.attention.comm.p2p import PointToPoint, Traffic
from engine.attention.masks import Causal
from engine.attention.op import run_attention
from tests.plans import plan_attention
from tests.ranks import run_on_ranks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
SLEEP = 6_000_000_000  # cycles of a GPU: about three seconds
CALLS = 8
MESSAGE = 1 << 27  # floats: more than NCCL's buffers take while the peer is busy


def lifetimes() -> dict[str, list[bool]]:
    """Whether sent tensors, their copies and received tensors exist: before the wait, after it, after the release."""
    group = dist.new_group()
    transport, here = PointToPoint(group, Traffic()), dist.get_rank()
    there, found = 1 - here, {}
    for name, dims in (("contiguous", (0, 1)), ("strided", (1, 0))):
        sent = torch.full((64, 64), float(here)).permute(dims)
        transfer = transport.start((sent,), there, tensor_specs((sent,)), there)
        held = [weakref.ref(transfer.sent[0]), weakref.ref(transfer.received[0])]
        del sent
        existing = [held[0]() is not None, held[1]() is not None]
        (received,) = transfer.wait()
        assert received.unique().tolist() == [there]
        existing.append(held[0]() is not None)
        del received
        existing.append(held[1]() is not None)
        transfer.release()
        existing.append(held[1]() is not None)
        found[name] = existing
    return found


def test_a_transfer_holds_its_tensors_until_it_is_waited_for_and_nothing_holds_them_longer() -> None:
    expected = [True, True, False, True, False]
    assert run_on_ranks(2, lifetimes) == 2 * [{"contiguous": expected, "strided": expected}]


def dropped() -> bool:
    """Whether `keep_until_over` gets the works and all tensors of a transfer that is dropped before it was waited for,
    and gets nothing of one that was waited for."""
    given: list[tuple[list[Any], tuple[Tensor, ...]]] = []
    p2p.keep_until_over = lambda works, tensors: given.append((works, tensors))  # this rank ends with the test
    transport, there = PointToPoint(dist.new_group(), Traffic()), 1 - dist.get_rank()
    sent = torch.ones(4, 4)
    transfer = transport.start((sent,), there, tensor_specs((sent,)), there)
    works, received = transfer.works, transfer.received
    for work in works:
        work.wait()
    assert not given
    del transfer
    ((found_works, found),) = given
    waited = transport.start((sent,), there, tensor_specs((sent,)), there)
    waited.wait()
    del waited
    return found_works is works and found == (*received, sent) and len(given) == 1


def test_a_transfer_that_is_dropped_before_it_was_waited_for_marks_all_its_tensors() -> None:
    assert run_on_ranks(2, dropped) == [True, True]


def arrived_whole(waited: bool) -> bool:
    """Whether a message arrives as it was sent, from memory that the sender gives to others at once, while the first
    rank's device is busy. With `waited`, the transfer is waited for before; else it is dropped."""
    group, here = dist.new_group(), dist.get_rank()
    transport, there = PointToPoint(group, Traffic()), 1 - here
    device = p2p.gpu_of(group) or torch.device("cpu")
    shape = (MESSAGE if device.type == "cuda" else 4096,)
    sent = torch.full(shape, float(here), device=device)
    specs = tensor_specs((sent,))
    transport.start((sent,), there, specs, there).wait()  # forms the communicator
    if device.type == "cuda":
        torch.cuda.synchronize()
        if here == 0:
            torch.cuda._sleep(SLEEP)
    transfer = transport.start((sent,), there, specs, there)
    (received,) = transfer.wait() if waited else transfer.received
    del sent, transfer
    others = [torch.full(shape, -1.0, device=device) for _ in range(3)]
    if device.type == "cuda":
        torch.cuda.synchronize()
    return bool((received == there).all()) and all(bool((other == -1).all()) for other in others)


def test_a_message_arrives_whole_from_memory_that_is_used_again_after_the_wait() -> None:
    assert run_on_ranks(2, arrived_whole, True) == [True, True]


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("waited", [True, False])
def test_a_message_of_a_gpu_arrives_whole_whether_the_sender_waits_or_drops_it(waited: bool) -> None:
    assert run_on_ranks(2, arrived_whole, waited, backend="nccl") == [True, True]


def grown_while_the_device_waits(exchange: str, streams: int) -> tuple[float, bool]:
    """Reserved memory that calls of attention add while nothing of them runs, in shards of this rank's queries; and
    whether nothing of them did."""
    cp, device = ContextParallel(), torch.device("cuda", torch.cuda.current_device())
    q, k, v = (
        torch.randn(1, 8192, heads, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (16, 8, 8)
    )
    plan = plan_attention(q, k, mask=Causal(), cp=cp, schedule="ring", exchange=exchange, forward_streams=streams)
    dout = torch.randn_like(q)

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run_attention(plan, q, k, v), (q, k, v), dout)

    for _ in range(3):
        call()
        torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    torch.cuda._sleep(SLEEP)
    slept = torch.cuda.current_stream().record_event()
    for _ in range(CALLS):
        call()
    ahead = not slept.query()
    grown = torch.cuda.memory_reserved() - before
    torch.cuda.synchronize()
    return grown / q.untyped_storage().nbytes(), ahead


def grown_by_way() -> dict[tuple[str, int], tuple[float, bool]]:
    """By exchange and number of streams."""
    ways = (("relay", 1), ("relay", 2), ("direct", 1))
    return {way: grown_while_the_device_waits(*way) for way in ways}


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")
def test_calls_that_the_host_is_ahead_of_need_no_more_memory() -> None:
    for found in run_on_ranks(GPUS, grown_by_way, backend="nccl"):
        assert [way for way, (_, ahead) in found.items() if not ahead] == []
        # Each of the calls sends several times that much.
        assert {way: grown for way, (grown, _) in found.items() if grown > 1} == {}
