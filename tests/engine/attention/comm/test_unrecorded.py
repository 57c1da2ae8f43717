"""Memory of transfers is held until they are waited for and free then: no mark of the process group keeps it longer."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine import ContextParallel
from engine.attention.accumulate.accumulators import tensor_specs
from engine.attention.comm.p2p import PointToPoint, Traffic
from engine.attention.comm.unrecorded import keep_until_over, unrecorded
from engine.attention.masks import Causal
from engine.attention.prepared import prepare_attention
from tests.ranks import run_on_ranks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
BUSY = 1_000_000_000  # cycles of a GPU: about half a second
CALLS = 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8])
def test_an_unrecorded_tensor_is_the_same_memory_with_the_same_shape_and_strides(dtype: torch.dtype) -> None:
    whole = torch.arange(24).to(dtype).view(2, 3, 4)
    for tensor in (whole, whole[:, 1:], whole.transpose(0, 1), whole[:, :0]):
        found = unrecorded(tensor)
        assert (found.shape, found.stride(), found.dtype) == (tensor.shape, tensor.stride(), dtype)
        assert torch.equal(found, tensor)
        assert found.data_ptr() == tensor.data_ptr()
        assert tensor.numel() == 0 or found.untyped_storage()._cdata != tensor.untyped_storage()._cdata


def test_an_unrecorded_tensor_needs_no_gradient_and_outlives_the_tensor() -> None:
    tensor = torch.ones(1000, dtype=torch.float64, requires_grad=True)
    found = unrecorded(tensor)
    assert not found.requires_grad
    del tensor
    others = [torch.zeros(1000, dtype=torch.float64) for _ in range(10)]
    assert found.sum().item() == 1000
    assert all(other.sum().item() == 0 for other in others)
    with torch.inference_mode():
        frozen = torch.zeros(3)
        unrecorded(frozen).add_(1)
        assert frozen.tolist() == [1, 1, 1]


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


class OverWith:
    """A transfer that is over once a stream of the GPU gets here."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def memory_is_given_out_again(mark: str) -> bool:
    """While another stream is busy that the memory was marked with, in one of three ways."""
    busy = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    tensor = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    address = tensor.data_ptr()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(BUSY)
    if mark == "abandoned":
        keep_until_over([OverWith(busy)], [tensor])
    else:
        (unrecorded(tensor) if mark == "unrecorded" else tensor).record_stream(busy)
    del tensor
    found = torch.empty(1 << 26, dtype=torch.uint8, device="cuda").data_ptr() == address
    assert not busy.query()
    torch.cuda.synchronize()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="needs a CUDA GPU")
@pytest.mark.parametrize(("mark", "again"), [("recorded", False), ("unrecorded", True), ("abandoned", False)])
def test_only_marked_memory_waits_for_the_device(mark: str, again: bool) -> None:
    assert memory_is_given_out_again(mark) == again


def grown_while_the_device_waits(exchange: str, streams: int) -> tuple[float, bool]:
    """Reserved memory that calls of attention add while nothing of them runs, in shards of this rank's queries; and
    whether nothing of them did."""
    cp, device = ContextParallel(), torch.device("cuda", torch.cuda.current_device())
    q, k, v = (
        torch.randn(1, 8192, heads, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (16, 8, 8)
    )
    attend = prepare_attention(
        q, k, mask=Causal(), cp=cp, schedule="ring", exchange=exchange, forward_streams=streams
    )  # fmt: skip
    dout = torch.randn_like(q)

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v), (q, k, v), dout)

    for _ in range(3):
        call()
        torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    torch.cuda._sleep(6 * BUSY)
    slept = torch.cuda.current_stream().record_event()
    for _ in range(CALLS):
        call()
    ahead = not slept.query()
    grown = torch.cuda.memory_reserved() - before
    torch.cuda.synchronize()
    return grown / q.untyped_storage().nbytes(), ahead


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize(("exchange", "streams"), [("relay", 1), ("relay", 2), ("direct", 1)])
def test_calls_that_the_host_is_ahead_of_need_no_more_memory(exchange: str, streams: int) -> None:
    for grown, ahead in run_on_ranks(GPUS, grown_while_the_device_waits, exchange, streams, backend="nccl"):
        assert ahead
        assert grown <= 1  # each of the calls sends several times that much
