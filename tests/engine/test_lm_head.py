"""The fused LM head and loss against its plain twin."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.lm_head import IGNORE, fused_loss_sum, plain_loss_sum

TOKENS, WIDTH, VOCAB = 37, 16, 53


def problem(dtype: torch.dtype, ignored: slice = slice(0, 0)) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Leaf hidden_TE and weight_VE, and labels_T of which `ignored` are -100."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels[ignored] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def loss_and_gradients(loss_sum, dtype, ignored=slice(0, 0), divisor=29.0, **options):
    hidden, weight, labels = problem(dtype, ignored)
    loss = loss_sum(hidden, weight, labels, **options)
    (loss / divisor).backward()
    return loss.detach(), hidden.grad, weight.grad


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return ((found.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("ignored", [slice(0, 0), slice(5, 20), slice(0, 36)])
@pytest.mark.parametrize("tile_tokens", [1, 8, 37, 1000, None])
def test_loss_and_gradients_equal_the_plain_twin_for_any_tile(tile_tokens, ignored) -> None:
    expected = loss_and_gradients(plain_loss_sum, torch.float64, ignored)
    found = loss_and_gradients(fused_loss_sum, torch.float64, ignored, tile_tokens=tile_tokens)
    assert [relative(f, e) < 1e-12 for f, e in zip(found, expected, strict=True)] == [True] * 3


def test_bf16_is_as_close_to_float64_as_the_plain_twin() -> None:
    hidden, weight, labels = problem(torch.bfloat16)
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    truth_loss = plain_loss_sum(hidden, weight, labels)
    (truth_loss / 29.0).backward()
    truth = truth_loss.detach(), hidden.grad, weight.grad
    plain = loss_and_gradients(plain_loss_sum, torch.bfloat16)
    fused = loss_and_gradients(fused_loss_sum, torch.bfloat16, tile_tokens=8)
    assert fused[0].dtype == torch.float32
    assert fused[1].dtype == fused[2].dtype == torch.bfloat16
    for found, own_kind, exact in zip(fused, plain, truth, strict=True):
        assert relative(found, exact) <= 1.5 * relative(own_kind, exact) + 1e-3


def test_an_awkward_divisor_does_not_bias_bf16_gradients() -> None:
    # 1 / 3 rounded to bf16 first would scale every entry by the same wrong factor.
    _, whole, _ = loss_and_gradients(fused_loss_sum, torch.bfloat16, divisor=1.0)
    _, third, _ = loss_and_gradients(fused_loss_sum, torch.bfloat16, divisor=3.0)
    ratio = third.double().norm() / whole.double().norm() * 3
    assert abs(ratio.item() - 1) < 4e-4


def test_a_rank_without_any_label_gives_zero_loss_and_gradients() -> None:
    for value in loss_and_gradients(fused_loss_sum, torch.float32, slice(0, TOKENS), tile_tokens=8):
        assert torch.equal(value, torch.zeros_like(value))


def test_backward_may_come_twice() -> None:
    hidden, weight, labels = problem(torch.float32)
    loss = fused_loss_sum(hidden, weight, labels, tile_tokens=8) / 7
    loss.backward(retain_graph=True)
    once = hidden.grad.clone(), weight.grad.clone()
    loss.backward()
    torch.testing.assert_close((hidden.grad, weight.grad), tuple(2 * gradient for gradient in once))


def test_evaluation_gives_the_same_loss_without_gradients() -> None:
    hidden, weight, labels = problem(torch.float64, slice(3, 9))
    with torch.no_grad():
        loss = fused_loss_sum(hidden, weight, labels, tile_tokens=8)
    assert not loss.requires_grad
    assert relative(loss, plain_loss_sum(hidden, weight, labels).detach()) < 1e-12


def test_a_frozen_weight_gets_no_gradient_and_hidden_still_does() -> None:
    hidden, weight, labels = problem(torch.float64)
    expected = loss_and_gradients(plain_loss_sum, torch.float64, divisor=1.0)[1]
    fused_loss_sum(hidden, weight.detach(), labels, tile_tokens=8).backward()
    assert relative(hidden.grad, expected) < 1e-12


class _LargestTensor(TorchDispatchMode):
    """Remembers the most elements any operation produced."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_no_tensor_is_larger_than_one_tile_of_logits() -> None:
    hidden, weight, labels = problem(torch.float32)
    with _LargestTensor() as fused:
        fused_loss_sum(hidden, weight, labels, tile_tokens=18).backward()
    with _LargestTensor() as plain:
        plain_loss_sum(hidden, weight, labels).backward()
    assert fused.elements == 18 * VOCAB
    assert plain.elements == TOKENS * VOCAB
