"""LM head and loss on GPUs: the Triton kernel against its reference implementation, two libraries against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.lm_head.loss import fused_loss_sum, plain_loss_sum
from engine.lm_head.loss_kernel import IGNORE, LIBRARIES, loss_sum_of
from engine.measurement import relative_errors
from engine.settings import TrialSettings
from engine.shape import ModelShape
from tests.engine.interpreter import in_the_interpreter, interpret
from tests.engine.lm_head.softmax_program import LARGE, SMALL, faults

SHAPE = ModelShape(name="head", layers=1, hidden=64, ffn=64, heads=1, kv_heads=1, head_dim=64, vocab=300)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
FORMS = [
    "own",
    *(
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                library.unsupported_reason() is not None, reason=str(library.unsupported_reason())
            ),
        )
        for name, library in LIBRARIES.items()
    ),
]


@in_the_interpreter
def test_the_kernel_equals_its_reference_in_tritons_interpreter() -> None:
    done = interpret("lm_head.softmax_program")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@needs_gpu
def test_the_kernel_equals_its_reference_on_a_gpu() -> None:
    assert faults("cuda", SMALL, tokens=700) == []
    assert faults("cuda", LARGE, tokens=300) == []


def problem(dtype: torch.dtype, ignored: slice) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(371, SHAPE.hidden, generator=generator).to("cuda", torch.bfloat16)
    weight = (torch.randn(SHAPE.vocab, SHAPE.hidden, generator=generator) / 4).to("cuda", torch.bfloat16)
    labels = torch.randint(SHAPE.vocab, (371,), generator=generator)
    labels[ignored] = IGNORE
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels.cuda()


def loss_and_gradients(loss_sum, dtype: torch.dtype, ignored: slice) -> tuple[Tensor, ...]:
    hidden, weight, labels = problem(dtype, ignored)
    loss = loss_sum(hidden, weight, labels)
    return (loss.detach(), *torch.autograd.grad(loss / 29, (hidden, weight)))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("ignored", [slice(0, 0), slice(50, 200), slice(0, 371)], ids=["none", "some", "all"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_every_form_is_as_close_to_float64_as_a_plain_bf16_run(name, ignored, z_loss) -> None:
    if z_loss and name in LIBRARIES and not LIBRARIES[name].z_loss:
        pytest.skip("refused: the library has no z-loss")
    settings = TrialSettings(task="lm_head", method="burst", model=SHAPE, seq_len=371, loss_kernel=name, z_loss=z_loss)
    truth = loss_and_gradients(lambda *inputs: plain_loss_sum(*inputs, z_loss), torch.float64, ignored)
    plain = relative_errors(
        loss_and_gradients(lambda *inputs: plain_loss_sum(*inputs, z_loss), torch.bfloat16, ignored), truth
    )
    found = relative_errors(loss_and_gradients(loss_sum_of(settings, "cuda"), torch.bfloat16, ignored), truth)
    # cut-cross-entropy leaves out what bf16 could not tell from 0 in a single entry.
    slack = 4.0 if name == "cce" else 1.5
    assert [error <= slack * own_kind + 1e-3 for error, own_kind in zip(found, plain, strict=True)] == [True] * 3


@pytest.mark.gpu
@needs_gpu
def test_the_logits_of_one_tile_are_all_that_is_held_beyond_gradients() -> None:
    tokens, words, width = 4096, 32000, 256
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(words, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(words, (tokens,), device="cuda")
    fused_loss_sum(hidden, weight, labels, tiles=4)  # compiled, and the matmuls' workspaces are there
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused_loss_sum(hidden, weight, labels, tiles=4)
    gradients = hidden.numel() * 2 + weight.numel() * 4
    assert torch.cuda.max_memory_allocated() - before < gradients + 4 * (tokens // 4) * words + (1 << 22)
