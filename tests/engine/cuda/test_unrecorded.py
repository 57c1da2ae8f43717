"""Tensors over the same memory that the allocator cannot mark, and memory that a dropped transfer still uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from engine.attention.comm.p2p import _SendReceive
from engine.cuda import streams as module
from engine.cuda.streams import keep_until_over, unrecorded

BUSY = 1_000_000_000  # cycles of a GPU: about half a second


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


class Abandoned:
    """A transfer that never comes. Waiting for it as users do would block the host."""

    def __init__(self, events: list[str], failed: bool) -> None:
        self._events, self._failed = events, failed

    def synchronize(self) -> None:
        self._events.append("stream waits")
        if self._failed:
            raise RuntimeError("the device has failed")

    def wait(self) -> None:
        raise AssertionError("the host waits for a transfer that may never come")


def test_every_abandoned_transfer_is_waited_for_on_a_stream_of_its_own_and_not_by_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    @contextmanager
    def made_current(stream: str) -> Iterator[None]:
        events.append(f"on {stream}")
        yield
        events.append("back")

    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=SimpleNamespace(stream=made_current)))
    monkeypatch.setattr(module, "_waiting_stream", lambda device: "waiting")
    on_gpu = SimpleNamespace(
        is_cuda=True, device="cuda:0", record_stream=lambda stream: events.append(f"mark {stream}")
    )
    keep_until_over([Abandoned(events, failed=True), Abandoned(events, failed=False)], [torch.ones(1), on_gpu, on_gpu])
    assert events == ["on waiting", "stream waits", "stream waits", "back", "mark waiting", "mark waiting"]


class OverWith:
    """A transfer that is over once a stream of the GPU gets here."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()

    def synchronize(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


def memory_is_given_out_again(mark: str) -> bool:
    """While another stream is busy that the memory was marked with, in one of four ways."""
    busy = torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    tensor = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    address = tensor.data_ptr()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(BUSY)
    if mark == "abandoned":
        keep_until_over([OverWith(busy)], [tensor])
    elif mark == "copied":
        with torch.cuda.stream(busy):  # which waits for a transfer that this one started
            _SendReceive((), (tensor,), None, "", [], copies=(tensor,)).wait()
    else:
        (unrecorded(tensor) if mark == "unrecorded" else tensor).record_stream(busy)
    del tensor
    found = torch.empty(1 << 26, dtype=torch.uint8, device="cuda").data_ptr() == address
    assert not busy.query()
    torch.cuda.synchronize()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("mark", "again"), [("recorded", False), ("unrecorded", True), ("abandoned", False), ("copied", False)]
)
def test_only_marked_memory_waits_for_the_device(mark: str, again: bool) -> None:
    assert memory_is_given_out_again(mark) == again
