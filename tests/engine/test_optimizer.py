"""Clipping and AdamW in one call: the numbers of torch's two, the gradients' norm, and the copies after any update."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.initialise import initialise
from engine.memory.moments import PiecewiseAdamW
from engine.models.decoder import Decoder
from engine.ops.copies import Copies, copy_of
from engine.optimizer import OnePassAdamW, adamw, clip_and_step
from engine.settings import STATES_BLOCK, AdamWSettings
from engine.shape import ModelShape

SHAPE = ModelShape(name="small", layers=2, hidden=12, ffn=20, heads=4, kv_heads=2, head_dim=6, vocab=61)


def trained(one_pass: bool, gradient_size: float, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Norms before clipping, then every parameter and moment after some steps on random gradients."""
    with torch.device("meta"):
        model = Decoder(SHAPE)
    initialise(model, 0, torch.device("cpu"))
    optimizer = adamw(model, 1e-2, AdamWSettings(), one_pass=one_pass)
    assert isinstance(optimizer, OnePassAdamW) == one_pass
    generator, norms = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = gradient_size * torch.randn(parameter.shape, generator=generator)
        norms.append(clip_and_step(model, optimizer, 1.0).item())
        optimizer.zero_grad()
    found = {}
    for name, parameter in model.named_parameters():
        for key, tensor in {"value": parameter.detach(), **optimizer.state[parameter]}.items():
            found[f"{name}.{key}"] = tensor
    return norms, found


@pytest.mark.parametrize("gradient_size", [1e-6, 1.0])
def test_one_call_clips_and_updates_as_torchs_two_do(gradient_size: float) -> None:
    (norms, found), (expected_norms, expected) = (trained(each, gradient_size) for each in (True, False))
    assert norms == expected_norms
    assert all((norm > 1) == (gradient_size == 1.0) for norm in norms)  # clipped, or not
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_scale_serves_one_step_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = OnePassAdamW([parameter], lr=0.1)
    parameter.grad, optimizer.gradient_scale = torch.ones(3), torch.tensor(0.5)
    optimizer.step()
    assert optimizer.gradient_scale is None
    assert torch.equal(parameter.grad, torch.full((3,), 0.5))
    optimizer.step()
    assert torch.equal(parameter.grad, torch.full((3,), 0.5))


UPDATES: dict[str, Callable[[torch.nn.Parameter], torch.optim.Optimizer]] = {
    "torch's": lambda parameter: OnePassAdamW([parameter], lr=0.5, fused=True),
    "torch's, in pieces": lambda parameter: PiecewiseAdamW([parameter], lr=0.5, fused=True),
    "the library's, of moments in 8 bits": lambda parameter: PiecewiseAdamW(
        [parameter], lr=0.5, offload=0.0, eight_bit=[parameter]
    ),
}


@pytest.mark.parametrize("update", UPDATES)
def test_copies_are_made_again_of_what_an_update_wrote(update: str) -> None:
    if "8 bits" in update:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: extra `test` has it")
    parameter = torch.nn.Parameter(torch.ones(2, STATES_BLOCK))
    optimizer, copies = UPDATES[update](parameter), Copies([parameter], torch.bfloat16)
    copies.refresh()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    copies.refresh()
    copy = copy_of(parameter)
    assert copy is not None
    assert copy.max() < 1
    assert torch.equal(copy, parameter.detach().bfloat16())


def test_matrices_are_decayed_and_norms_are_not() -> None:
    with torch.device("meta"):
        model = Decoder(SHAPE)
    initialise(model, 0, torch.device("cpu"))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = adamw(model, 1e-2, AdamWSettings(weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        kept = 1 - 1e-2 * 0.5 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), kept * before[name])
    assert any(parameter.ndim == 1 for parameter in model.parameters())
