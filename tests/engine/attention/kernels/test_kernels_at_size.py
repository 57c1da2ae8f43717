"""A kernel beyond 2^32 elements: the last rows of a million-token tile are those of a short one.

With a window, the last rows of a long tile see the same keys as the last rows of a short tile does, and the last keys
are seen by no others: output and gradients must be equal to the bit of what the same kernel makes of the end alone, but
for the order in which it adds.
"""

from __future__ import annotations

import pytest
import torch

from engine.attention.geometry.tiles import Band
from engine.attention.kernels import BackwardInputs, kernel_named
from engine.measurement import relative_error

ROWS = (5 << 18) + 128  # 1.3M, 5.4e9 elements of queries
END = 1 << 16
WINDOW = 8191
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def last(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor[:, -rows:].contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: runs its kernels")
def test_the_end_of_a_million_tokens_is_that_of_a_short_tile() -> None:
    kernel = kernel_named("fa4")
    if kernel.unsupported_reason() is not None:
        pytest.skip(kernel.unsupported_reason())
    if torch.cuda.mem_get_info()[0] < 80 << 30:
        pytest.skip("needs 80 GiB of free GPU memory: queries, output and their gradients are 10 GiB each")
    torch.manual_seed(0)
    q, dout = (torch.randn(1, ROWS, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, ROWS, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    band, scale = Band(-WINDOW, 0), HEAD_DIM**-0.5
    out, lse = kernel.forward(q, k, v, band, scale)
    short_out, short_lse = kernel.forward(*(last(t, END) for t in (q, k, v)), band, scale)
    sure = END - WINDOW - 1  # rows whose whole window lies in the short tile
    assert relative_error(last(out, sure), last(short_out, sure)) < 1e-3
    assert relative_error(lse[..., -sure:], short_lse[..., -sure:]) < 1e-5
    delta = torch.randn_like(lse)
    gradients = kernel.backward(BackwardInputs(q, dout, lse, delta, k, v), band, scale, False)
    ends = [last(t, END) for t in (q, dout)], [t[..., -END:].contiguous() for t in (lse, delta)]
    short = kernel.backward(BackwardInputs(*ends[0], *ends[1], last(k, END), last(v, END)), band, scale, False)
    for name, found, expected in zip(("dq", "dk", "dv"), gradients, short, strict=True):
        assert relative_error(last(found, sure), last(expected, sure)) < 5e-3, name
        assert torch.isfinite(found[:, :END]).all(), name
