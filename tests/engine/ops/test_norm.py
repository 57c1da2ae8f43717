"""More elements than one kernel call may have are normalised in runs of tokens: same numbers, same gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.ops import norm
from engine.ops.norm import RMSNorm


@pytest.mark.parametrize("shape", [(2, 5, 8), (2, 5, 3, 8)])
@pytest.mark.parametrize("most", [8, 24, 79, 1 << 31])
def test_runs_of_tokens_equal_the_whole(monkeypatch, shape, most) -> None:
    monkeypatch.setattr(norm, "MAX_ELEMENTS", most)
    torch.manual_seed(0)
    x, grad = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    found, expected = RMSNorm(8, eps=1e-6).double(), nn.RMSNorm(8, eps=1e-6).double()
    with torch.no_grad():
        found.weight.copy_(torch.randn(8))
        expected.load_state_dict(found.state_dict())
    assert torch.equal(found(x), expected(x))
    inputs = torch.autograd.grad(found(x), (x, found.weight), grad)
    for gradient, truth in zip(inputs, torch.autograd.grad(expected(x), (x, expected.weight), grad), strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-12, atol=1e-12)


def test_no_call_of_the_kernel_sees_more_elements_than_it_may(monkeypatch) -> None:
    sizes, whole = [], F.rms_norm
    monkeypatch.setattr(norm, "MAX_ELEMENTS", 24)
    monkeypatch.setattr(F, "rms_norm", lambda x, *rest: sizes.append(x.numel()) or whole(x, *rest))
    RMSNorm(8)(torch.randn(1, 7, 8))
    assert sizes == [24, 24, 8]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with 40 GiB")
def test_rows_beyond_32_bits_are_normalised_on_a_gpu() -> None:
    tokens = (1 << 20) + 128
    x = torch.ones(1, tokens, 4096, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        out = RMSNorm(4096, eps=1e-6).to("cuda", torch.bfloat16)(x * 3)
    assert out[0, :: 1 << 10].eq(1).all()
    assert out[0, -128:].eq(1).all()
