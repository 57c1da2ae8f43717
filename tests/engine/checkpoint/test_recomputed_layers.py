"""Layers run again change what is kept, never what comes out: equal gradients, few inputs at once, and as many runs as
are counted."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import engine.memory.offload
from engine.attention.algorithms.saved import SavedOutput
from engine.attention.context import ContextParallel
from engine.burst import METHOD
from engine.checkpoint import recompute
from engine.checkpoint.counts import inputs_at_once, kept_at_once, kept_places, layers_recomputed
from engine.checkpoint.recompute import AttendOnce, Recompute, set_activations
from engine.layers.head_groups import attend_in
from engine.models.decoder import Decoder
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape

LAYERS = 11  # groups of 2, 3, 5 and 8 leave a shorter one at the end
SHAPE = ModelShape(name="deep", layers=LAYERS, hidden=16, ffn=24, heads=4, kv_heads=2, head_dim=4, vocab=61)
SEQ_LEN = 16
INPUT_BYTES = 2 * SEQ_LEN * SHAPE.hidden * 8
EVERY = (1, 2, 3, 5, 8, 11)
BISECTED = [
    Checkpoint(every=every, tail=tail, offload=offload, replay="bisect")
    for every, (tail, offload) in itertools.product(EVERY, ((0.0, "none"), (0.5, "inputs"), (1.0, "all")))
]
HELD = [
    Checkpoint(every=1, tail=0.0),
    Checkpoint(every=1, tail=1.0),
    Checkpoint(every=1, tail=0.37, offload="all"),
    Checkpoint(every=2, tail=0.0),
    Checkpoint(every=3, tail=0.5, offload="inputs"),
    Checkpoint(every=3, tail=1.0, offload="all"),
    Checkpoint(every=99, tail=0.25, offload="all"),  # one group
]
POLICIES = pytest.mark.parametrize("settings", BISECTED + HELD, ids=str)
SOME = pytest.mark.parametrize(
    "settings", [each for each in BISECTED if each.every in (5, 11)] + HELD[2:], ids=str
)  # fmt: skip


class WatchedAttention:
    """The method's attention. Counts its calls, one for each run of a layer, those among them that are computed whole,
    and the results of runs without a graph that live when the next one begins."""

    def __init__(self, settings: Checkpoint) -> None:
        trial = TrialSettings(
            task="train", method="burst", model=SHAPE, seq_len=SEQ_LEN, dtype="fp64", checkpoint=settings
        )
        self._attend = METHOD.attention(ContextParallel(), trial)
        self.calls = self.computed = self.alive = 0
        self._results: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, saved: Any = None) -> Any:
        self.calls += 1
        self.computed += saved is None
        self.alive = max(self.alive, len(self._results))
        out, lse = self._attend(q, k, v, saved=saved)
        if not torch.is_grad_enabled():
            self._results.add(out.untyped_storage())
        return out, lse

    def keep(self, out: Tensor, lse: Tensor, tail: float) -> Any:
        return self._attend.keep(out, lse, tail)


def model_with(settings: Checkpoint) -> tuple[Decoder, WatchedAttention, Recompute | None]:
    torch.manual_seed(0)
    model = Decoder(SHAPE).double()
    torch.nn.init.normal_(model.head.weight, std=0.1)
    attend = WatchedAttention(settings)
    for block in model.blocks:
        block.attend = attend
    return model, attend, set_activations(settings, list(model.blocks))


def loss_of(model: Decoder, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SHAPE.vocab, (2, SEQ_LEN + 1), generator=generator)
    return model(tokens[:, :-1], torch.arange(SEQ_LEN), tokens[:, 1:])


def gradients(model: Decoder) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture(scope="module")
def kept() -> list[list[Tensor]]:
    """Gradients of two batches with everything kept."""
    found = []
    for seed in (1, 2):
        model, _, _ = model_with(Checkpoint(every=0))
        loss_of(model, seed).backward()
        found.append(gradients(model))
    return found


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def held_bytes(keeper: Recompute | None) -> int:
    assert keeper is not None
    return sum(store.held_bytes for store in {keeper.inputs, keeper.attention})


@POLICIES
def test_gradients_are_those_of_keeping_everything(settings: Checkpoint, kept) -> None:
    model, attend, keeper = model_with(settings)
    loss_of(model).backward()
    assert_equal(gradients(model), kept[0])
    # Forward, for its own activations, and for the inputs of those after it.
    assert attend.calls == 2 * LAYERS + layers_recomputed(settings, LAYERS)
    if settings.replay == "hold":
        assert attend.computed == LAYERS * (2 if settings.tail == 0 else 1)
    assert held_bytes(keeper) == 0


@pytest.mark.parametrize("settings", [each for each in BISECTED + HELD if each.tail != 0.37], ids=str)
def test_the_saved_fraction_is_the_configured_one(settings: Checkpoint) -> None:
    model, _, keeper = model_with(settings)
    loss = loss_of(model)
    attention = INPUT_BYTES + INPUT_BYTES // SHAPE.head_dim  # out, which is as wide as an input, and LSE
    assert held_bytes(keeper) == -(-LAYERS // settings.every) * INPUT_BYTES + LAYERS * settings.tail * attention
    del loss
    assert held_bytes(keeper) == 0


def test_a_run_keeps_the_input_halfway_and_halfway_from_there() -> None:
    assert kept_places(0, 7) == [4, 6]
    assert kept_places(0, 3) == [2]
    assert kept_places(4, 5) == kept_places(6, 6) == []
    for first in range(40):
        for place in range(first, 40):
            assert all(first < stop < place for stop in kept_places(first, place))


@pytest.mark.parametrize("layers", [1, 7, 11, 64, 80])
def test_runs_and_inputs_are_those_of_handing_them_out_one_by_one(layers: int) -> None:
    for every in range(1, layers + 2):
        settings = Checkpoint(every=every, replay="bisect")
        runs, most = 0, 0
        for begin in range(0, layers, every):
            kept = [0]
            for place in reversed(range(min(every, layers - begin))):
                kept = [at for at in kept if at <= place]
                runs += place - kept[-1]
                kept += kept_places(kept[-1], place)
                most = max(most, len({*kept, place}) - 1)
        assert layers_recomputed(settings, layers) == runs
        assert inputs_at_once(settings, layers) == most <= math.ceil(math.log2(every))


@pytest.mark.parametrize("every", EVERY)
def test_few_inputs_and_no_attention_exist_at_once(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Checkpoint(every=every, tail=0.5, replay="bisect")
    monkeypatch.delattr(AttendOnce, "ahead")
    model, attend, keeper = model_with(settings)
    assert keeper is not None
    recomputed: weakref.WeakSet[Any] = weakref.WeakSet()
    alive: list[int] = []
    held: list[int] = []

    def watched(layer: Any) -> Any:
        def run(*args: Any) -> Tensor:
            alive.append(len(recomputed))
            held.append(keeper.inputs.held_bytes)
            out = layer(*args)
            if not torch.is_grad_enabled():
                recomputed.add(out.untyped_storage())
            return out

        return run

    for block in model.blocks:
        block.layer = watched(block.layer)
    loss = loss_of(model)
    before = keeper.inputs.held_bytes
    assert (len(recomputed), before) == (0, -(-LAYERS // every) * INPUT_BYTES)
    loss.backward()
    assert max(alive) == inputs_at_once(settings, LAYERS) <= math.ceil(math.log2(every))
    assert max(held) <= before + kept_at_once(settings, LAYERS) * INPUT_BYTES
    assert keeper.inputs.held_bytes == 0
    assert attend.alive == 0


@pytest.mark.parametrize("every", EVERY)
def test_a_group_that_holds_its_inputs_drops_each_with_its_layer(every: int) -> None:
    model, _, _ = model_with(Checkpoint(every=every, replay="hold"))
    recomputed: weakref.WeakSet[Any] = weakref.WeakSet()
    alive: list[int] = []  # by layer, as backward reaches it

    def watched(layer: Any) -> Any:
        def run(*args: Any) -> Tensor:
            if torch.is_grad_enabled():
                alive.append(len(recomputed))
            out = layer(*args)
            if not torch.is_grad_enabled():
                recomputed.add(out.untyped_storage())
            return out

        return run

    for block in model.blocks:
        block.layer = watched(block.layer)
    loss = loss_of(model)
    alive.clear()
    loss.backward()
    assert alive == [layer % every for layer in reversed(range(LAYERS))]


@pytest.mark.parametrize("replay", ["hold", "bisect"])
@pytest.mark.parametrize("heads_at_once", [None, 1])
@pytest.mark.parametrize("every", [2, 4])
def test_what_a_layer_has_saved_goes_with_its_backward(every: int, replay: Any, heads_at_once: int | None) -> None:
    """Not with the loss, whose graph lives to the end of the step, and its attention not with the layer's group."""
    model, _, keeper = model_with(Checkpoint(every=every, tail=0.5, offload="none", replay=replay))
    assert keeper is not None
    attention: list[int] = []  # as backward reaches a layer, the last one first
    inputs: list[int] = []

    def watched(layer: Any) -> Any:
        def run(*args: Any) -> Tensor:
            out: Tensor = layer(*args)
            if out.requires_grad:
                out.register_hook(lambda _: attention.append(keeper.attention.held_bytes))
                out.register_hook(lambda _: inputs.append(keeper.inputs.held_bytes))
            return out

        return run

    for block in model.blocks:
        block.layer = watched(block.layer)
        block.attend_groups = heads_at_once and attend_in(heads_at_once, 2)
    loss = loss_of(model)
    of_layer = (INPUT_BYTES + INPUT_BYTES // SHAPE.head_dim) // 2  # half of out, which is as wide as an input, and LSE
    assert held_bytes(keeper) == -(-LAYERS // every) * INPUT_BYTES + LAYERS * of_layer
    loss.backward()
    assert attention == [layers * of_layer for layers in range(LAYERS, 0, -1)]
    # A group's last layer is the first one in backward, before which nothing is saved between.
    ends = [layers for layers in range(LAYERS, 0, -1) if layers % every == 0 or layers == LAYERS]
    assert [inputs[LAYERS - layers] for layers in ends] == [-(-layers // every) * INPUT_BYTES for layers in ends]


@pytest.mark.parametrize("offload", ["inputs", "all"])
@pytest.mark.parametrize("every", EVERY)
def test_no_more_host_memory_is_locked_than_was_reserved(
    every: int, offload: Any, monkeypatch: pytest.MonkeyPatch, kept
) -> None:
    settings = Checkpoint(every=every, tail=0.5, offload=offload, replay="bisect")
    model, _, keeper = model_with(settings)
    assert keeper is not None
    sizes: list[int] = []
    lock = engine.memory.offload.host_buffer
    monkeypatch.setattr(
        engine.memory.offload, "host_buffer", lambda nbytes, device: (sizes.append(nbytes), lock(nbytes, device))[1]
    )
    attention = [INPUT_BYTES // 2, INPUT_BYTES // 8]  # half of the tokens; one LSE for the four values of a head
    keeper.reserve(INPUT_BYTES, attention, torch.device("cpu"))
    inputs = -(-LAYERS // every) + kept_at_once(settings, LAYERS)
    expected = {INPUT_BYTES: inputs} | (dict.fromkeys(attention, LAYERS) if offload == "all" else {})
    assert Counter(sizes) == expected
    reserved = len(sizes)
    loss_of(model).backward()
    assert len(sizes) == reserved
    assert_equal(gradients(model), kept[0])


@SOME
def test_backward_may_run_twice(settings: Checkpoint, kept) -> None:
    model, attend, keeper = model_with(settings)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    assert_equal(gradients(model), [2 * gradient for gradient in kept[0]])
    assert attend.calls == LAYERS + 2 * (LAYERS + layers_recomputed(settings, LAYERS))
    del loss
    assert held_bytes(keeper) == 0


@pytest.mark.parametrize("replay", ["hold", "bisect"])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("offload", ["none", "all"])
def test_a_backward_from_inside_leaves_the_rest_of_the_graph_usable(every: int, replay: Any, offload: Any) -> None:
    """It passes the first layers for the last time, which later layers of their group are computed from."""

    def of_later(settings: Checkpoint) -> list[Tensor]:
        model, _, _ = model_with(settings)
        inner: list[Tensor] = []
        run = model.blocks[1].layer
        model.blocks[1].layer = lambda *args: inner.append(run(*args)) or inner[-1]
        loss = loss_of(model)
        inner[0].square().sum().backward()
        return list(torch.autograd.grad(loss, list(model.blocks[2].parameters())))

    settings = Checkpoint(every=every, tail=0.5, replay=replay, offload=offload)
    assert_equal(of_later(settings), of_later(Checkpoint(every=0)))


@SOME
def test_several_forwards_may_be_open_and_evaluation_keeps_nothing(settings: Checkpoint, kept) -> None:
    model, attend, keeper = model_with(settings)
    losses = [loss_of(model, seed) for seed in (1, 2)]
    before, calls = held_bytes(keeper), attend.calls
    with torch.no_grad():
        loss_of(model, seed=3)
    assert (held_bytes(keeper), attend.calls) == (before, calls + LAYERS)
    while losses:
        losses.pop(0).backward()
    assert_equal(gradients(model), [one + other for one, other in zip(*kept, strict=True)])
    assert held_bytes(keeper) == 0


def live_bytes(settings: Checkpoint) -> int:
    """Bytes of device memory that a forward leaves allocated, as torch's allocator counts them."""
    model, _, _ = model_with(settings)
    gc.collect()  # so that nothing of earlier tests is freed within the profile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loss = loss_of(model)
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in recorded.key_averages())


def test_memory_falls_as_less_is_saved() -> None:
    """By as much as was asked for: nothing else holds on to an input or an output."""
    tail0, attention = live_bytes(Checkpoint(every=1, tail=0.0)), INPUT_BYTES + INPUT_BYTES // SHAPE.head_dim
    assert live_bytes(Checkpoint(every=0)) - tail0 > 5 * LAYERS * INPUT_BYTES
    slack = 2048  # of the allocator's own rounding and of what one run has and another has not
    for changes, fewer in (
        ({"tail": 1.0}, -LAYERS * attention),
        ({"tail": 0.25}, -LAYERS * attention / 4),
        ({"every": 2}, (LAYERS - 6) * INPUT_BYTES),
        ({"every": 3, "tail": 1.0, "offload": "all"}, LAYERS * INPUT_BYTES),  # all on the host
    ):
        assert tail0 - live_bytes(Checkpoint(**{"every": 1, "tail": 0.0} | changes)) == pytest.approx(fewer, abs=slack)


class Noted(torch.autograd.Function):
    """Attention of a kind; notes when its backward runs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, events: list[str]) -> Tensor:
        ctx.events = events
        return q + k.repeat_interleave(q.shape[2] // k.shape[2], 2) + v.repeat_interleave(q.shape[2] // v.shape[2], 2)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        ctx.events.append("attention backward")
        of_keys = dout.unflatten(2, (SHAPE.kv_heads, -1)).sum(3)
        return dout, of_keys, of_keys, None


@pytest.mark.parametrize("has_room", [True, False])
def test_an_input_comes_from_the_host_before_attentions_backward_where_there_is_room(
    has_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention's results follow it in either case, and the first layer, which is the last, asks for nothing."""
    events: list[str] = []
    prefetch = engine.memory.offload._OnHost.prefetch

    def noting(saved: engine.memory.offload._OnHost) -> None:
        if saved._coming is None:
            events.append("input" if len(saved._specs) == 1 else "results")
        prefetch(saved)

    class Attention:
        def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, saved: Any = None) -> tuple[Tensor, Tensor]:
            return Noted.apply(q, k, v, events), q.detach()[..., 0].transpose(1, 2)

        def keep(self, out: Tensor, lse: Tensor, tail: float) -> SavedOutput:
            return SavedOutput(out.detach(), lse)

    monkeypatch.setattr(engine.memory.offload._OnHost, "prefetch", noting)
    monkeypatch.setattr(recompute, "_has_room", lambda block, x: has_room)
    settings = Checkpoint(offload="all")
    model = Decoder(dataclasses.replace(SHAPE, layers=3)).double()
    for block in model.blocks:
        block.attend = Attention()
    kept = set_activations(settings, list(model.blocks))
    loss_of(model).backward()
    del kept
    ahead, after = (["input"], ["results"]) if has_room else ([], ["input", "results"])
    last = ["input", "results"]  # nothing comes before the last layer
    between = [*ahead, "attention backward", *after]
    assert events == [*last, *between, *between, "attention backward"]


def test_there_is_room_for_an_input_as_large_as_a_layers_gradients() -> None:
    block = Decoder(SHAPE).blocks[0]
    elements = sum(parameter.numel() for parameter in block.parameters())
    assert recompute._has_room(block, torch.empty(elements))
    assert not recompute._has_room(block, torch.empty(elements + 1))
    assert not recompute._has_room(block.requires_grad_(False), torch.empty(1))
