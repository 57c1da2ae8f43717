"""The passes over parts: rows that see no key; and at a size that fills a GPU every row equals the torch form."""

from __future__ import annotations

import pytest
import torch

from engine.attention.accumulate.accumulators import add_parts, merge_parts, row_dot


def test_a_row_that_sees_no_key_in_any_part_is_zero_and_not_nan() -> None:
    parts = [(torch.full((1, 2, 1, 3), float(seen)), torch.full((1, 1, 2), float(seen))) for seen in (1, 2)]
    for part_BLND, lse_BNL in parts:
        part_BLND[:, 1], lse_BNL[:, :, 1] = 0, -torch.inf
    out_BLND, lse_BNL = torch.empty(1, 2, 1, 3), torch.empty(1, 1, 2)
    merge_parts(parts, out_BLND, lse_BNL)
    assert torch.equal(out_BLND[:, 1], torch.zeros(1, 1, 3))
    assert lse_BNL[0, 0, 1] == -torch.inf
    weights = torch.tensor([1.0, 2.0]).softmax(0)
    torch.testing.assert_close(out_BLND[:, 0], (weights @ torch.tensor([1.0, 2.0])).expand(1, 1, 3))
    torch.testing.assert_close(lse_BNL[0, 0, 0], torch.tensor([1.0, 2.0]).logsumexp(0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: compares the fused kernels with torch's")
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_fused_passes_equal_the_torch_forms_on_every_row(count) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(1, 4096, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    lses = [torch.randn(1, 32, 4096, device="cuda") * 3 for _ in range(count)]
    for running in (False, True):  # True: the result lies where the first part did
        parts = [parts[0].float(), *parts[1:]] if running else parts
        wide, wide_lse = torch.empty_like(parts[0], dtype=torch.float64), torch.empty_like(lses[0], dtype=torch.float64)
        merge_parts([(p.double(), s.double()) for p, s in zip(parts, lses, strict=True)], wide, wide_lse)
        out, lse = (parts[0].clone(), lses[0].clone()) if running else (torch.empty_like(parts[0]).float(), lses[0] * 0)
        pairs = list(zip(parts, lses, strict=True))
        merge_parts([(out, lse), *pairs[1:]] if running else pairs, out, lse)
        torch.testing.assert_close(out.double(), wide, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), wide_lse, rtol=1e-5, atol=1e-5)
    total = torch.empty_like(parts[0], dtype=torch.float32)
    add_parts(parts, total)
    torch.testing.assert_close(total.double(), sum(part.double() for part in parts), rtol=1e-6, atol=1e-6)
    delta = row_dot(parts[0], parts[-1]).double()
    torch.testing.assert_close(delta, row_dot(parts[0].double(), parts[-1].double()), rtol=1e-4, atol=1e-4)
