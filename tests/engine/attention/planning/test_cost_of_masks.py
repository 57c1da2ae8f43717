"""What attention costs on a CPU follows the mask's area: scores and bytes are counted, not timed."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import burst_attention
from engine.attention.geometry.tiles import CAUSAL, FULL, Band, Tile
from engine.attention.kernels import kernel_named
from engine.attention.masks import BlockSparse, Causal, Documents, Full, LocalGlobal, SlidingWindow, Strided
from engine.attention.reference import dense_gradients
from tests.engine.live_bytes import LiveBytes

MASKS = [
    Full(),
    Causal(),
    SlidingWindow(100),
    SlidingWindow(100, 50),
    SlidingWindow(100, global_tokens=16),
    SlidingWindow(100, 50, global_tokens=16),
    BlockSparse(LocalGlobal(1, 1), 64),
    BlockSparse(LocalGlobal(1, 1), 64, causal=True),
    BlockSparse(Strided(8), 64, causal=True),
    Documents((100, 300, 57), repeat=True),
    Documents((100, 300, 57), causal=False, repeat=True),
]
KERNELS = ["cpu", "reference"]
SEQ_LEN, HEADS, HEAD_DIM = 1024, 1, 4
GRANULARITY = 128  # tokens: scores beyond the visible ones that a query may cost on each side
FORWARD, BACKWARD = 2, 5  # matrix products over all scores

aten = torch.ops.aten


class Scores(TorchDispatchMode):
    """Counts scores formed, summed over the products of forward and backward and over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket
        if name is aten.bmm:
            (batch, rows, inner), columns = args[0].shape, args[1].shape[2]
            self.count += batch * rows * inner * columns // HEAD_DIM
        elif name is aten._scaled_dot_product_flash_attention_for_cpu:  # arguments at their defaults are not in `args`
            self.count += FORWARD * self._of(args[0], args[1], causal=any(args[4:5]))
        elif name is aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.count += BACKWARD * self._of(args[1], args[2], causal=args[7])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _of(q_BNLD: torch.Tensor, k_BNMD: torch.Tensor, *, causal: bool) -> int:
        """Scores of one call of the op, which skips what lies beyond its own diagonal and nothing else."""
        rows, columns = q_BNLD.shape[2], k_BNMD.shape[2]
        return len(q_BNLD) * HEADS * Tile(slice(0, rows), slice(0, columns), CAUSAL if causal else FULL).area()


def attend(mask, kernel: str, seq_len: int) -> None:
    """Forward and backward of a whole sequence on one rank."""
    inputs = [torch.randn(1, seq_len, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]
    burst_attention(*inputs, mask=mask, kernel=kernel).sum().backward()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_scores_formed_are_the_visible_ones_and_few_more_for_each_query(mask, kernel) -> None:
    with Scores() as scores:
        attend(mask, kernel, SEQ_LEN)
    formed, visible = scores.count / HEADS / (FORWARD + BACKWARD), mask.area(SEQ_LEN)
    assert visible <= formed <= visible + 2 * GRANULARITY * SEQ_LEN


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_memory_at_twice_the_length_is_twice_the_memory_for_every_mask(mask, kernel) -> None:
    peaks = []
    for seq_len in (SEQ_LEN, 2 * SEQ_LEN):
        with LiveBytes() as live:
            attend(mask, kernel, seq_len)
        peaks.append(live.peak)
    assert peaks[1] < 2.5 * peaks[0]


# Bands in the tiles of a longer sequence: a limit on one side only, far from either corner, a single diagonal.
@pytest.mark.parametrize("band", [Band(-1000, None), Band(None, 1000), Band(-300, 2000), Band(7, 7), Band(1500, None)])
@pytest.mark.parametrize("name", KERNELS)
def test_a_band_of_any_place_and_width_costs_its_visible_pairs(name, band) -> None:
    rows, columns = 2000, 3600  # every row sees a key: no limit above is below 0, none below is beyond 1600
    q, k, v = (torch.randn(1, tokens, HEADS, HEAD_DIM) for tokens in (rows, columns, columns))
    with Scores() as scores:
        kernel_named(name).forward(q, k, v, band, 1.0)
    formed, visible = scores.count / HEADS / FORWARD, Tile(slice(0, rows), slice(0, columns), band).area()
    assert visible <= formed <= visible + 2 * GRANULARITY * rows


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_sequence_of_several_blocks_equals_dense_float64(mask, kernel) -> None:
    seq_len = 4 * GRANULARITY + 37
    q, k, v, dout = (torch.randn(1, seq_len, HEADS, HEAD_DIM, dtype=torch.float64) for _ in range(4))
    inputs = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out = burst_attention(*inputs, mask=mask, kernel=kernel)
    found = (out, *torch.autograd.grad(out, inputs, dout))
    for value, expected in zip(found, dense_gradients(q, k, v, dout, mask), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-10)
