"""Activation checkpointing changes what is kept, never what comes out."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from engine.attention.context import ContextParallel
from engine.burst import METHOD
from engine.checkpoint.recompute import Recompute, set_activations
from engine.models.decoder import Decoder
from engine.settings import Checkpoint, ModelShape, TrialSettings

LAYERS = 5  # groups of 2 and of 3 leave a shorter one at the end
SHAPE = ModelShape(name="small", layers=LAYERS, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=61)
SETTINGS = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=24, dtype="fp64")
POLICIES = {
    "keep": Checkpoint(every=0),
    "tail0": Checkpoint(every=1, tail=0.0),
    "tail1": Checkpoint(every=1, tail=1.0),
    "quarter": Checkpoint(every=1, tail=0.25),
    "odd tail, host": Checkpoint(every=1, tail=0.37, offload="all"),
    "every 2": Checkpoint(every=2, tail=1.0),
    "every 2, tail0": Checkpoint(every=2, tail=0.0),
    "every 3, half, inputs": Checkpoint(every=3, tail=0.5, offload="inputs"),
    "every 3, host": Checkpoint(every=3, tail=1.0, offload="all"),
    "one group": Checkpoint(every=9, tail=0.5, offload="all"),
}
RECOMPUTING = [name for name in POLICIES if name != "keep"]


class CountedAttention:
    """The method's attention, counting forwards that were computed and forwards that were recomputed."""

    def __init__(self) -> None:
        self._attend = METHOD.attention(ContextParallel(), SETTINGS)
        self.computed = self.recomputed = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, saved: Any = None) -> Any:
        if saved is None:
            self.computed += 1
        else:
            self.recomputed += 1
        return self._attend(q, k, v, saved=saved)

    def keep(self, out: Tensor, lse: Tensor, tail: float) -> Any:
        return self._attend.keep(out, lse, tail)


def model_with(policy: str) -> tuple[Decoder, CountedAttention, Recompute | None]:
    torch.manual_seed(0)
    model = Decoder(SHAPE).double()
    torch.nn.init.normal_(model.head.weight, std=0.1)
    attend = CountedAttention()
    for block in model.blocks:
        block.attend = attend
    return model, attend, set_activations(POLICIES[policy], list(model.blocks))


def loss_of(model: Decoder, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SHAPE.vocab, (2, SETTINGS.seq_len + 1), generator=generator)
    return model(tokens[:, :-1], torch.arange(SETTINGS.seq_len), tokens[:, 1:])


def gradients(model: Decoder) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture(scope="module")
def kept() -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients with everything kept."""
    model, _, _ = model_with("keep")
    loss = loss_of(model, seed=1)
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_recomputes_its_layers_with_equal_gradients(policy: str, kept) -> None:
    model, attend, _ = model_with(policy)
    loss = loss_of(model, seed=1)
    loss.backward()
    settings = POLICIES[policy]
    if settings.every == 0:
        assert (attend.computed, attend.recomputed) == (LAYERS, 0)
    elif settings.every == 1:
        assert (attend.computed, attend.recomputed) == ((2 * LAYERS, 0) if settings.tail == 0 else (LAYERS, LAYERS))
    else:  # of each group all but the last layer run twice more, and find attention computed the second time
        twice = LAYERS - -(-LAYERS // settings.every)
        again = LAYERS if settings.tail == 0 else 0
        assert (attend.computed, attend.recomputed) == (LAYERS + again, LAYERS + twice - again)
    torch.testing.assert_close((loss.detach(), gradients(model)), kept, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_several_forwards_may_be_open_at_once(policy: str) -> None:
    expected, _, _ = model_with("keep")
    for seed in (1, 2):
        loss_of(expected, seed).backward()
    model, _, keeper = model_with(policy)
    losses = [loss_of(model, seed) for seed in (1, 2)]
    before = held_bytes(keeper)
    with torch.no_grad():
        loss_of(model, seed=3)  # an evaluation in between must not disturb what is saved
    assert held_bytes(keeper) == before
    while losses:
        losses.pop(0).backward()
    torch.testing.assert_close(gradients(model), gradients(expected), rtol=1e-11, atol=1e-13)
    assert held_bytes(keeper) == 0


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_backward_may_run_twice(policy: str, kept) -> None:
    model, attend, _ = model_with(policy)
    loss = loss_of(model, seed=1)
    loss.backward(retain_graph=True)
    once = attend.computed - LAYERS
    loss.backward()
    torch.testing.assert_close(gradients(model), [2 * gradient for gradient in kept[1]], rtol=1e-11, atol=1e-13)
    assert attend.computed == LAYERS + 2 * once


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_evaluation_computes_each_layer_once_and_keeps_nothing(policy: str, kept) -> None:
    model, attend, keeper = model_with(policy)
    with torch.no_grad():
        loss = loss_of(model, seed=1)
    assert (attend.computed, attend.recomputed) == (LAYERS, 0)
    assert held_bytes(keeper) == 0
    torch.testing.assert_close(loss, kept[0], rtol=1e-12, atol=0)


def held_bytes(keeper: Recompute | None) -> int:
    """Bytes held for backward, wherever they are."""
    assert keeper is not None
    return sum(store.held_bytes for store in {keeper.inputs, keeper.attention})


@pytest.mark.parametrize("policy", RECOMPUTING)
def test_the_saved_fraction_is_the_configured_one(policy: str) -> None:
    model, _, keeper = model_with(policy)
    loss = loss_of(model, seed=1)
    settings, tokens, itemsize = POLICIES[policy], 2 * SETTINGS.seq_len, 8
    groups = -(-LAYERS // settings.every)
    saved = round(settings.tail * SETTINGS.seq_len) / SETTINGS.seq_len
    attention = SHAPE.heads * (SHAPE.head_dim + 1)  # out and LSE of a token
    assert held_bytes(keeper) == tokens * itemsize * (groups * SHAPE.hidden + LAYERS * saved * attention)
    del loss
    assert held_bytes(keeper) == 0


def live_bytes(policy: str) -> int:
    """Bytes of device memory that a forward leaves allocated, as torch's allocator counts them."""
    model, _, _ = model_with(policy)
    gc.collect()  # so that nothing of earlier tests is freed within the profile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        loss = loss_of(model, seed=1)
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in recorded.key_averages())


def test_memory_falls_as_less_is_saved() -> None:
    """By as much as was asked for: nothing else holds on to an input or an output."""
    element = 2 * SETTINGS.seq_len * 8
    inputs, attention = element * SHAPE.hidden, element * SHAPE.heads * (SHAPE.head_dim + 1)
    tail0 = live_bytes("tail0")
    assert live_bytes("keep") - tail0 > 5 * LAYERS * inputs
    slack = 2048  # of the allocator's own rounding and of what one run has and another has not
    assert live_bytes("tail1") - tail0 == pytest.approx(LAYERS * attention, abs=slack)
    assert live_bytes("quarter") - tail0 == pytest.approx(LAYERS * attention / 4, abs=slack)
    assert tail0 - live_bytes("every 2, tail0") == pytest.approx(2 * inputs, abs=slack)  # 5 layers are 3 groups
    assert tail0 - live_bytes("every 3, host") == pytest.approx(LAYERS * inputs, abs=slack)  # all on the host
