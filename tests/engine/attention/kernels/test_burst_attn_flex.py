"""The parts of kernel `flex` that need no GPU: block masks, the forward run eagerly, the rescaled backward.

On a GPU `test_kernels.py` compares the compiled kernel with the reference.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from engine.attention.accumulate.accumulators import row_dot
from engine.attention.geometry.tiles import CAUSAL, FULL, Band
from engine.attention.kernels import BackwardInputs, KernelProblem, flex, kernel_named
from engine.attention.kernels.reference import visible_pairs

REFERENCE = kernel_named("reference")
BANDS = [CAUSAL, Band(-7, 3), Band(None, 200), Band(-300, None), Band(-129, -1), Band(128, 255)]
CPU = torch.device("cpu")


def listed(numbers: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The grid of blocks a BlockMask's lists name."""
    grid = torch.zeros(indices.shape[-2:], dtype=torch.bool)
    for row, count in enumerate(numbers[0, 0].tolist()):
        grid[row, indices[0, 0, row, :count].long()] = True
    return grid


@pytest.mark.parametrize(("rows", "columns"), [(256, 256), (384, 256), (300, 517), (64, 96)])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_blocks_without_a_visible_pair_are_skipped_and_whole_ones_not_masked(band, rows, columns) -> None:
    mask = flex.block_mask(band, rows, columns, CPU)
    visible = visible_pairs(band, rows, columns, CPU)
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128, dtype=torch.bool)
    padded[:rows, :columns] = visible
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2)
    full = blocks.all(-1).all(-1)
    assert torch.equal(listed(mask.full_kv_num_blocks, mask.full_kv_indices), full)
    assert torch.equal(listed(mask.kv_num_blocks, mask.kv_indices), blocks.any(-1).any(-1) & ~full)
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    assert torch.equal(mask.mask_mod(None, None, row, column), visible)


def tile(rows: int, columns: int, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    """q, k, v and dout of a tile, float64."""
    generator = torch.Generator().manual_seed(rows)
    shapes = [(2, rows, heads, 16), (2, columns, kv_heads, 16), (2, columns, kv_heads, 16), (2, rows, heads, 16)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-7, 3)], ids=str)
def test_both_passes_equal_the_reference_where_they_are_not_compiled(band, softcap, monkeypatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)  # no gradient on CPUs
    q, k, v, dout = (t.float() for t in tile(150, 150))
    kernel, reference = (replace(each, softcap=softcap) for each in (flex.KERNEL, REFERENCE))
    expected = reference.forward(q, k, v, band, 0.25)
    given = BackwardInputs(q, dout, expected[1] + 0.5, row_dot(dout, expected[0]) * 0.6, k, v)
    found = [*kernel.forward(q, k, v, band, 0.25), *kernel.backward(given, band, 0.25, False)]
    for f, e in zip(found, [*expected, *reference.backward(given, band, 0.25, False)], strict=True):
        torch.testing.assert_close(f, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-7, 3)], ids=str)
@pytest.mark.parametrize("beyond", [0.0, 0.5, 40.0])
def test_the_rescaled_backward_gives_the_gradients_of_whole_rows(band, beyond) -> None:
    q, k, v, dout = tile(24, 24)
    out, lse = REFERENCE.forward(q, k, v, band, 0.25)
    whole_lse, delta = lse + beyond, row_dot(dout, out) * 0.6  # the rows have more keys elsewhere
    expected = REFERENCE.backward(BackwardInputs(q, dout, whole_lse, delta, k, v), band, 0.25, False)

    def attend(q_BNLD, k_BKMD, v_BKMD):
        k_BNMD, v_BNMD = (t.repeat_interleave(2, dim=1) for t in (k_BKMD, v_BKMD))
        scores = (q_BNLD @ k_BNMD.transpose(-1, -2) * 0.25).masked_fill(~visible_pairs(band, 24, 24, CPU), -torch.inf)
        return scores.softmax(-1) @ v_BNMD, scores.logsumexp(-1)

    found = flex.rescaled_backward(attend, *(t.transpose(1, 2) for t in (dout, q, k, v)), whole_lse, delta)
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f.transpose(1, 2), e, rtol=1e-9, atol=1e-12)


def test_head_dims_and_dtypes_it_cannot_run_are_refused() -> None:
    def unsupported_reason(dtype: torch.dtype, head_dim: int) -> str | None:
        return flex.KERNEL.refuse(
            KernelProblem(device=torch.device("cuda"), dtype=dtype, heads=4, kv_heads=4, head_dim=head_dim)
        )

    assert unsupported_reason(torch.bfloat16, 128) is None
    for dim in (8, 96):  # torch refuses the first on GPUs, with an error of its compiler
        assert "powers of 2 from 16 on" in (unsupported_reason(torch.bfloat16, dim) or "")
    assert "bf16 or fp16" in (unsupported_reason(torch.float32, 128) or "")
    assert "up to 256" in (unsupported_reason(torch.bfloat16, 512) or "")
