"""What is kept on the host comes back as it was, in buffers that are exact, used again and never shared."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.checkpoint.recompute import set_activations
from engine.memory.offload import DeviceStore, HostStore, _OnHost, host_buffer, host_like
from engine.models.decoder import Decoder, DenseAttention
from engine.settings import Checkpoint
from engine.shape import ModelShape

CPU = torch.device("cpu")
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")],
    ),
]


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097, 3 << 20])
def test_a_host_buffer_has_exactly_the_bytes_asked_for(nbytes: int) -> None:
    buffer = host_buffer(nbytes, CPU)
    assert buffer.numel() == buffer.untyped_storage().nbytes() == nbytes
    buffer.fill_(7)
    assert buffer.eq(7).all()


def test_a_host_tensor_has_shape_and_dtype_of_the_tensor() -> None:
    tensor = torch.randn(3, 5, 2).to(torch.bfloat16).transpose(0, 1)
    hosted = host_like(tensor, CPU).copy_(tensor)
    assert hosted.is_contiguous()
    assert hosted.dtype == tensor.dtype
    assert torch.equal(hosted, tensor)


def test_more_host_memory_than_there_is_ends_with_a_reason() -> None:
    with pytest.raises(MemoryError, match="no 4611686018427387904 bytes of memory to map"):
        host_buffer(1 << 62, CPU)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("store_class", [DeviceStore, HostStore])
def test_each_fetch_returns_the_tensors_that_were_put(store_class, device: str) -> None:
    store = store_class()
    tensors = torch.randn(4, 6, device=device).T, torch.arange(7, device=device), torch.zeros(0, 3, device=device)
    kept = store.put(tensors)
    assert store.held_bytes == 4 * 6 * 4 + 7 * 8
    for _ in range(2):  # backward may come twice
        kept.prefetch()
        for found, expected in zip(kept.fetch(), tensors, strict=True):
            assert torch.equal(found, expected)
            assert found.device == expected.device
            assert found.dtype == expected.dtype
    del kept
    assert store.held_bytes == 0


@pytest.mark.parametrize("device", DEVICES)
def test_the_host_copy_owes_nothing_to_the_tensors_it_was_made_of(device: str) -> None:
    store = HostStore()
    tensor = torch.ones(1000, device=device)
    kept = store.put((tensor,))
    store.settle()
    tensor.zero_()
    [found] = kept.fetch()
    assert found.eq(1).all()
    del kept
    gc.collect()
    store.put((torch.full((1000,), 5.0, device=device),))  # in the buffer that was given back
    assert found.eq(1).all()


def test_a_put_that_finds_no_memory_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HostStore()
    take, taken = store.take, []

    def take_one(nbytes: int, device: torch.device) -> torch.Tensor:
        if taken:
            raise MemoryError("no more")
        taken.append(nbytes)
        return take(nbytes, device)

    monkeypatch.setattr(store, "take", take_one)
    with pytest.raises(MemoryError, match="no more"):
        store.put((torch.ones(8), torch.ones(9)))
    assert taken == [32]
    assert store.held_bytes == 0


class Order(TorchDispatchMode):
    """Notes what is launched, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.noted.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_the_stream_of_copies_waits_for_the_contiguous_copy_of_a_tensor_that_has_gaps(monkeypatch) -> None:
    store, order = HostStore(), Order()
    monkeypatch.setattr(store, "copies", lambda device: order.noted.append("wait"))  # for what is launched so far
    with order:
        store.put((torch.ones(4, 6).T,))
    assert order.noted.index("clone") < order.noted.index("wait")


def buffer_addresses(store: HostStore, sizes: list[int]) -> set[int]:
    """Where copies of tensors of these sizes lie when all of them are held at once."""
    kept = [store.put((torch.randn(size),)) for size in sizes]
    return {away._buffers[0].data_ptr() for away in kept}


def test_buffers_are_used_again_from_step_to_step_and_held_by_one_owner_each() -> None:
    store = HostStore()
    first = buffer_addresses(store, [100, 100, 200])
    assert len(first) == 3
    assert buffer_addresses(store, [200, 100, 100]) == first
    assert len(buffer_addresses(store, [100] * 4) & first) == 2


def test_the_next_puts_use_reserved_buffers_which_replace_those_of_other_sizes() -> None:
    store = HostStore()
    buffer_addresses(store, [50, 50, 100])
    store.reserve({400: 2, 800: 1}, CPU)
    reserved = {buffer.data_ptr() for buffers in store._free.values() for buffer in buffers}
    assert len(reserved) == 3
    assert buffer_addresses(store, [100, 200, 100]) == reserved
    store.reserve({400: 1, 800: 1}, CPU)  # enough lies free
    assert {buffer.data_ptr() for buffers in store._free.values() for buffer in buffers} == reserved


@pytest.mark.parametrize("device", DEVICES)
def test_many_layers_leave_and_return_in_backward_order(device: str) -> None:
    store = HostStore()
    generator = torch.Generator(device).manual_seed(0)
    layers = [torch.randn(64, 64, generator=generator, device=device) for _ in range(9)]
    expected = [layer.clone() for layer in layers]
    kept = []
    while layers:
        kept.append(store.put((layers.pop(0),)))
        torch.empty(64, 64, device=device).normal_(generator=generator)  # would take memory that was freed too early
    for index in reversed(range(len(kept))):
        [found] = kept.pop().fetch()
        if kept:
            kept[-1].prefetch()
        assert torch.equal(found, expected[index])


class Logged(DenseAttention):
    """Dense attention that notes when backward reaches it."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def __call__(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, **saved: Any) -> tuple[Tensor, Tensor]:
        out_BLND, lse_BNL = super().__call__(q_BLND, k_BLKD, v_BLKD, **saved)
        if out_BLND.requires_grad:
            out_BLND.register_hook(lambda dout_BLND: self._log.append("attention"))
        return out_BLND, lse_BNL


@pytest.mark.parametrize("replay", ["hold", "bisect"])
def test_an_input_is_prefetched_after_the_attention_that_backward_passes_before_it(
    replay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention's backward is where a layer holds most: the input that is wanted next is no part of that."""
    log: list[str] = []
    prefetch = _OnHost.prefetch

    def noted(kept: _OnHost) -> None:
        if kept._coming is None:
            log.append("input")
        prefetch(kept)

    monkeypatch.setattr(_OnHost, "prefetch", noted)
    shape = ModelShape(name="small", layers=4, hidden=8, ffn=8, heads=2, kv_heads=1, head_dim=4, vocab=11)
    model = Decoder(shape)
    for block in model.blocks:
        block.attend = Logged(log)
    torch.nn.init.normal_(model.head.weight)
    set_activations(Checkpoint(every=1, offload="inputs", replay=replay), list(model.blocks))
    tokens = torch.randint(shape.vocab, (1, 6))
    loss = model(tokens, torch.arange(6), tokens)
    assert log == []
    loss.backward()
    assert log == ["input", "attention"] * shape.layers
