"""Activation checkpointing changes what is kept, never what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.context import ContextParallel
from engine.burst import METHOD
from engine.checkpoint import set_activations
from engine.model import Decoder
from engine.settings import Checkpoint, ModelShape, TrialSettings

SHAPE = ModelShape(name="small", layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=61)
SETTINGS = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=24, dtype="fp64")
POLICIES = {"keep": Checkpoint(every=0), "tail0": Checkpoint(every=1, tail=0.0), "tail1": Checkpoint(every=1, tail=1.0)}


class CountedAttention:
    """The method's attention, counting forwards that were computed and forwards that were replayed."""

    def __init__(self) -> None:
        self._attend = METHOD.attention(ContextParallel(), SETTINGS)
        self.computed = self.replayed = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, stored: Any = None) -> Any:
        if stored is None:
            self.computed += 1
        else:
            self.replayed += 1
        return self._attend(q, k, v, stored=stored)

    def keep(self, out: Tensor, lse: Tensor, tail: float) -> Any:
        return self._attend.keep(out, lse, tail)


def model_with(policy: str) -> tuple[Decoder, CountedAttention]:
    torch.manual_seed(0)
    model = Decoder(SHAPE).double()
    torch.nn.init.normal_(model.head.weight, std=0.1)
    attend = CountedAttention()
    for block in model.blocks:
        block.attend = attend
    set_activations(POLICIES[policy], list(model.blocks))
    return model, attend


def loss_of(model: Decoder, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(SHAPE.vocab, (2, SETTINGS.seq_len + 1), generator=generator)
    return model(tokens[:, :-1], torch.arange(SETTINGS.seq_len), tokens[:, 1:])


def gradients(model: Decoder) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.fixture(scope="module")
def kept() -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients with everything kept."""
    model, _ = model_with("keep")
    loss = loss_of(model, seed=1)
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize(("policy", "computed", "replayed"), [("keep", 2, 0), ("tail0", 4, 0), ("tail1", 2, 2)])
def test_each_policy_recomputes_what_it_says_with_equal_gradients(policy, computed, replayed, kept) -> None:
    model, attend = model_with(policy)
    loss = loss_of(model, seed=1)
    loss.backward()
    assert (attend.computed, attend.replayed) == (computed, replayed)
    torch.testing.assert_close((loss.detach(), gradients(model)), kept, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("policy", ["tail0", "tail1"])
def test_several_forwards_may_be_open_at_once(policy: str) -> None:
    expected, _ = model_with("keep")
    for seed in (1, 2):
        loss_of(expected, seed).backward()
    model, _ = model_with(policy)
    losses = [loss_of(model, seed) for seed in (1, 2)]
    with torch.no_grad():
        loss_of(model, seed=3)  # an evaluation in between must not disturb what is stored
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(gradients(model), gradients(expected), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("policy", ["tail0", "tail1"])
def test_backward_may_come_twice(policy: str, kept) -> None:
    model, attend = model_with(policy)
    loss = loss_of(model, seed=1)
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(gradients(model), [2 * gradient for gradient in kept[1]], rtol=1e-12, atol=1e-14)
    assert attend.computed == (6 if policy == "tail0" else 2)


@pytest.mark.parametrize("policy", ["tail0", "tail1"])
def test_evaluation_computes_each_layer_once(policy: str, kept) -> None:
    model, attend = model_with(policy)
    with torch.no_grad():
        loss = loss_of(model, seed=1)
    assert (attend.computed, attend.replayed) == (2, 0)
    torch.testing.assert_close(loss, kept[0], rtol=1e-12, atol=0)


def kept_elements(policy: str) -> int:
    """Elements that the graph of one forward holds, each storage once."""
    model, _ = model_with(policy)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes() // 8
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = loss_of(model, seed=1)
    assert loss.requires_grad
    return sum(held.values())


def test_recomputation_leaves_less_in_the_graph() -> None:
    assert kept_elements("tail0") < kept_elements("keep") / 2
