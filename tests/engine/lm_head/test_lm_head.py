"""The fused LM head and loss against the plain implementation."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.lm_head.log_probs import fused_log_probs
from engine.lm_head.loss import fused_loss_sum, plain_loss_sum
from engine.lm_head.loss_kernel import IGNORE
from engine.measurement import relative_error, relative_errors

TOKENS, WIDTH, VOCAB = 37, 16, 53
TILES = {"one token": TOKENS, "8 tokens": 5, "all tokens": 1, "more than there are": 1000, "chosen": 0}


def problem(dtype: torch.dtype, ignored: slice = slice(0, 0)) -> tuple[Tensor, Tensor, Tensor]:
    """Leaf hidden_TE and weight_VE, and labels_T of which `ignored` are -100."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels[ignored] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def loss_and_gradients(
    loss_sum: Callable[..., Tensor],
    dtype: torch.dtype,
    ignored: slice = slice(0, 0),
    divisor: float = 29.0,
    **options: object,
) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, labels = problem(dtype, ignored)
    loss = loss_sum(hidden, weight, labels, **options)
    (loss / divisor).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("ignored", [slice(0, 0), slice(5, 20), slice(0, 36)])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
def test_loss_and_gradients_equal_the_plain_implementation_for_any_tile(tiles, z_loss, ignored) -> None:
    expected = loss_and_gradients(plain_loss_sum, torch.float64, ignored, z_loss=z_loss)
    found = loss_and_gradients(fused_loss_sum, torch.float64, ignored, z_loss=z_loss, tiles=tiles)
    assert max(relative_errors(found, expected)) < 1e-12


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
def test_log_probs_and_gradients_of_any_weights_of_tokens_equal_log_softmax(tiles: int) -> None:
    weights_T = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    found, expected = [], []
    for kept, computed in ((found, True), (expected, False)):
        hidden, weight, labels = problem(torch.float64, slice(5, 20))
        if computed:
            log_probs_T = fused_log_probs(hidden, weight, labels, tiles=tiles)
        else:
            of_words_TV = torch.log_softmax(hidden @ weight.T, dim=-1)
            log_probs_T = of_words_TV.gather(1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(labels == IGNORE, 0)
        kept += [log_probs_T.detach(), *torch.autograd.grad((log_probs_T.exp() * weights_T).sum(), (hidden, weight))]
    assert max(relative_errors(found, expected)) < 1e-12


def test_z_loss_adds_the_squared_log_partition_of_every_counted_token() -> None:
    hidden, weight, labels = problem(torch.float64, slice(5, 20))
    lse = torch.logsumexp(hidden @ weight.T, dim=-1)[labels != IGNORE]
    added = plain_loss_sum(hidden, weight, labels, z_loss=0.25) - plain_loss_sum(hidden, weight, labels)
    torch.testing.assert_close(added, 0.25 * lse.square().sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_bf16_is_as_close_to_float64_as_the_plain_implementation(z_loss) -> None:
    hidden, weight, labels = problem(torch.bfloat16)
    hidden, weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    truth_loss = plain_loss_sum(hidden, weight, labels, z_loss)
    (truth_loss / 29.0).backward()
    truth = truth_loss.detach(), hidden.grad, weight.grad
    plain = loss_and_gradients(plain_loss_sum, torch.bfloat16, z_loss=z_loss)
    fused = loss_and_gradients(fused_loss_sum, torch.bfloat16, z_loss=z_loss, tiles=5)
    assert fused[0].dtype == torch.float32
    assert fused[1].dtype == fused[2].dtype == torch.bfloat16
    for found, own_kind in zip(relative_errors(fused, truth), relative_errors(plain, truth), strict=True):
        assert found <= 1.5 * own_kind + 1e-3


def test_a_label_that_is_nearly_sure_keeps_its_small_gradient() -> None:
    # p of the label is 1 - 1e-5; a logit of 20 less a log-partition of 20.00001 would lose half of it in fp32.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[20.0], [8.4870745]])
    exact = torch.nn.functional.cross_entropy(hidden.double() @ weight.double().T, torch.tensor([0]))
    leaf = weight.clone().requires_grad_()
    loss = fused_loss_sum(hidden, leaf, torch.tensor([0]))
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=2e-2)
    assert leaf.grad[0].item() == pytest.approx(-exact.item(), rel=2e-2)


def test_words_of_probability_zero_do_not_count() -> None:
    # Logits of -inf, as of a padded vocabulary.
    hidden = torch.ones(2, 1, dtype=torch.float64)
    weight = torch.tensor([[-torch.inf]] * 10 + [[1.0], [2.0]] + [[-torch.inf]] * 5, dtype=torch.float64)
    loss = fused_loss_sum(hidden, weight, torch.tensor([10, 11]))
    assert loss.item() == pytest.approx(plain_loss_sum(hidden, weight, torch.tensor([10, 11])).item(), rel=1e-12)


def test_an_awkward_divisor_does_not_bias_bf16_gradients() -> None:
    # 1 / 3 rounded to bf16 first would scale every entry by the same wrong factor.
    _, whole, _ = loss_and_gradients(fused_loss_sum, torch.bfloat16, divisor=1.0)
    _, third, _ = loss_and_gradients(fused_loss_sum, torch.bfloat16, divisor=3.0)
    ratio = third.double().norm() / whole.double().norm() * 3
    assert abs(ratio.item() - 1) < 4e-4


def test_a_rank_without_any_label_gives_zero_loss_and_gradients() -> None:
    for value in loss_and_gradients(fused_loss_sum, torch.float32, slice(0, TOKENS), z_loss=0.1, tiles=5):
        assert torch.equal(value, torch.zeros_like(value))


def test_a_rank_without_any_token_gives_zero_loss_and_gradients() -> None:
    hidden, weight = torch.zeros(0, WIDTH, requires_grad=True), torch.ones(VOCAB, WIDTH, requires_grad=True)
    loss = fused_loss_sum(hidden, weight, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_backward_may_run_twice() -> None:
    hidden, weight, labels = problem(torch.float32)
    loss = fused_loss_sum(hidden, weight, labels, tiles=5) / 7
    loss.backward(retain_graph=True)
    once = hidden.grad.clone(), weight.grad.clone()
    loss.backward()
    torch.testing.assert_close((hidden.grad, weight.grad), tuple(2 * gradient for gradient in once))


def test_evaluation_gives_the_same_loss_without_gradients() -> None:
    hidden, weight, labels = problem(torch.float64, slice(3, 9))
    with torch.no_grad():
        loss = fused_loss_sum(hidden, weight, labels, z_loss=0.1, tiles=5)
    assert not loss.requires_grad
    assert relative_error(loss, plain_loss_sum(hidden, weight, labels, z_loss=0.1)) < 1e-12


def test_a_frozen_weight_gets_no_gradient_and_hidden_still_does() -> None:
    hidden, weight, labels = problem(torch.float64)
    expected = loss_and_gradients(plain_loss_sum, torch.float64, divisor=1.0)[1]
    fused_loss_sum(hidden, weight.detach(), labels, tiles=5).backward()
    assert relative_error(hidden.grad, expected) < 1e-12


@pytest.mark.parametrize("wrong", [VOCAB, -1])
def test_a_label_that_is_no_word_is_refused_in_one_sentence(wrong) -> None:
    hidden, weight, labels = problem(torch.float32, slice(0, 3))
    labels[9] = wrong
    sentence = f"label {wrong} is no word of a vocabulary of 53; expected 0 to 52, or -100"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        fused_loss_sum(hidden, weight, labels)


class _Watch(TorchDispatchMode):
    """Remembers the most elements any operation produced, and how many matrix multiplications ran."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.matmuls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        self.matmuls += "mm" in function.__name__
        return result


def watched(loss_sum: Callable[..., Tensor], ignored: slice = slice(0, 0), **options: object) -> _Watch:
    hidden, weight, labels = problem(torch.float32, ignored)
    with _Watch() as watch:
        loss_sum(hidden, weight, labels, **options).backward()
    return watch


def test_no_tensor_is_larger_than_one_tile_of_logits() -> None:
    assert watched(fused_loss_sum, tiles=2).elements == 19 * VOCAB
    assert watched(plain_loss_sum).elements == TOKENS * VOCAB
    # A tile below the size of the weight's gradient: nothing but that gradient is larger.
    assert watched(fused_loss_sum, tiles=TOKENS).elements == VOCAB * WIDTH


def test_logits_are_computed_once() -> None:
    assert watched(fused_loss_sum, tiles=5).matmuls == 3 * 5


def test_runs_of_ignored_tokens_are_skipped() -> None:
    assert watched(fused_loss_sum, slice(8, 32), tiles=5).matmuls == 3 * 2
    assert watched(fused_loss_sum, slice(0, TOKENS), tiles=5).matmuls == 0


@pytest.mark.parametrize(
    ("hidden", "weight", "labels", "words"),
    [
        ((12, 16), (30, 16), torch.zeros(10, dtype=torch.long), "have 12 rows and 10 labels; pass one for each"),
        ((12, 16), (30, 16), torch.zeros(14, dtype=torch.long), "have 12 rows and 14 labels; pass one for each"),
        ((12, 16), (16, 30), torch.zeros(12, dtype=torch.long), r"\(16, 30\).* are not .* flatten or transpose"),
        ((2, 6, 16), (30, 16), torch.zeros(12, dtype=torch.long), r"\(2, 6, 16\).* are not .* flatten or transpose"),
        ((12, 16), (30, 16), torch.zeros(12), "labels are torch.float32; pass whole numbers"),
        ((12, 16), (30, 16), torch.zeros(12, dtype=torch.uint8), "labels are torch.uint8; pass whole numbers"),
        ((12, 16), (0, 16), torch.zeros(12, dtype=torch.long), "have a vocabulary of no words; pass the weight"),
        ((12, 16), (30, 16), [0] * 12, "and labels are Tensor, Tensor, list; pass torch tensors"),
    ],
)
def test_log_probs_of_tensors_that_do_not_fit_are_refused(hidden, weight, labels, words) -> None:
    with pytest.raises(ValueError, match=words):
        fused_log_probs(torch.zeros(hidden), torch.zeros(weight), labels)
    with pytest.raises(ValueError, match="pass one floating-point dtype"):
        fused_log_probs(torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(9, 8), torch.zeros(4, dtype=torch.long))
    narrow, whole = torch.zeros(4, 8).to(torch.float8_e4m3fn), torch.zeros(4, dtype=torch.long)
    with pytest.raises(ValueError, match="pass one floating-point dtype of 16 bits or more"):
        fused_log_probs(narrow, narrow, whole)
    for tiles in (-1, 1.5, "a"):
        with pytest.raises(ValueError, match=f"tiles is {tiles!r}; give a whole number"):
            fused_log_probs(torch.zeros(4, 8), torch.zeros(9, 8), whole, tiles=tiles)


def test_autocast_around_log_probabilities_changes_no_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(rows, 8, generator=generator).requires_grad_() for rows in (13, 11)]
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            log_probs_T = fused_log_probs(*tensors, torch.arange(13) % 11)
            found.append((log_probs_T, *torch.autograd.grad(log_probs_T.sum(), tensors)))
    assert all(map(torch.equal, *found))
