"""Kernel `cpu`: torch's own flash attention for CPUs, whose backward takes an external LSE.

The op aligns its causal mask top-left. Other bands go in as additive masks, of which the op computes every element,
hidden or not. Such a tile is computed in blocks of queries, each against the keys that its queries see, so that time
and memory follow the visible pairs. Inputs narrower than fp32 are widened first, so that partial results are not
rounded before they are summed: the error of a bf16 run is then the same on any number of ranks. The op is equally
fast in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.geometry.tiles import Band, Sequences, Tile, Visible, row_blocks
from engine.attention.kernels import (
    Gradients,
    KernelProblem,
    WholeInputs,
    heads_first,
    repeat_heads,
    softcap_unsupported_reason,
    sum_heads,
)
from engine.attention.kernels.stand_in import StandInKernel
from engine.ops.autograd import accumulation_dtype

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# Queries per call for a band. Measured on one core, windows of 64 to 1024 tokens, head dims 32 and 128: blocks of 32 to
# 128 are equally fast, 256 up to 1.5 times slower for windows of 64 and 256, and smaller blocks cost more calls.
_BLOCK_ROWS = 128


def _additive(band: Band, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
    """The band as an additive mask, or None when the op's causal flag is enough."""
    if band.kind != "band":
        return None
    mask = torch.zeros(rows, columns, dtype=dtype)
    if band.lo is not None:
        mask += torch.full_like(mask, -torch.inf).tril(band.lo - 1)
    if band.hi is not None:
        mask += torch.full_like(mask, -torch.inf).triu(band.hi + 1)
    return mask


def _calls(visible: Visible, rows: int, columns: int, dtype: torch.dtype) -> Iterator[tuple[Tile, Tensor | None]]:
    """The calls of the op that compute a call of ours: the rectangle of each, and its additive mask."""
    alike, mask = None, None
    whole = Tile(slice(0, rows), slice(0, columns))
    tiles = visible.tiles if isinstance(visible, Sequences) else (whole._replace(band=visible),)
    for sequence in tiles:
        if sequence.band.kind != "band":
            yield sequence, None
            continue
        top, left = sequence.q.start, sequence.k.start
        for tile in row_blocks(sequence.band, sequence.rows, sequence.columns, _BLOCK_ROWS):
            shape = (tile.band, tile.rows, tile.columns)
            if shape != alike:  # the blocks inside a window are all alike
                alike, mask = shape, _additive(*shape, dtype)
            q, k = (slice(at + each.start, at + each.stop) for at, each in ((top, tile.q), (left, tile.k)))
            yield Tile(q, k, tile.band), mask


@dataclass(frozen=True)
class CpuKernel(StandInKernel):
    """aten::_scaled_dot_product_flash_attention_for_cpu, forward and backward."""

    name = "cpu"
    writes_input_dtype = False

    def refuse(self, problem: KernelProblem) -> str | None:
        if problem.device.type != "cpu":
            return f"kernel cpu runs on CPU tensors, found {problem.device.type}; choose kernel auto"
        return None if problem.softcap is None else softcap_unsupported_reason(self.name)

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, visible: Visible, scale: float
    ) -> tuple[Tensor, Tensor]:
        heads, dtype = q_BLND.shape[2], accumulation_dtype(q_BLND.dtype)
        q_BNLD = heads_first(q_BLND)
        k_BNMD, v_BNMD = (heads_first(repeat_heads(kv_BMKD, heads)) for kv_BMKD in (k_BMKD, v_BMKD))
        out_BLND = q_BLND.new_zeros(q_BLND.shape, dtype=dtype)
        lse_BNL = q_BNLD.new_full(q_BNLD.shape[:3], -torch.inf)
        for tile, mask in _calls(visible, q_BLND.shape[1], k_BMKD.shape[1], dtype):
            part_BNLD, lse_BNL[:, :, tile.q] = _forward(
                q_BNLD[:, :, tile.q],
                k_BNMD[:, :, tile.k],
                v_BNMD[:, :, tile.k],
                0.0,
                tile.band.kind == "causal",
                attn_mask=mask,
                scale=scale,
            )
            out_BLND[:, tile.q] = part_BNLD.transpose(1, 2)
        return out_BLND, lse_BNL

    def backward_of_whole(self, given: WholeInputs, visible: Visible, scale: float, deterministic: bool) -> Gradients:
        q_BLND, out_BLND, dout_BLND, lse_BNL, k_BMKD, v_BMKD = given
        heads, kv_heads = q_BLND.shape[2], k_BMKD.shape[2]
        dtype = accumulation_dtype(q_BLND.dtype)
        dout_BNLD, out_BNLD = heads_first(dout_BLND), heads_first(out_BLND)
        q_BNLD = heads_first(q_BLND)
        k_BNMD, v_BNMD = (heads_first(repeat_heads(kv_BMKD, heads)) for kv_BMKD in (k_BMKD, v_BMKD))
        dq_BLND = q_BLND.new_zeros(q_BLND.shape, dtype=dtype)
        dk_BMND, dv_BMND = (k_BMKD.new_zeros(*k_BMKD.shape[:2], *q_BLND.shape[2:], dtype=dtype) for _ in range(2))
        for tile, mask in _calls(visible, q_BLND.shape[1], k_BMKD.shape[1], dtype):
            parts_BNLD = _backward(
                dout_BNLD[:, :, tile.q],
                q_BNLD[:, :, tile.q],
                k_BNMD[:, :, tile.k],
                v_BNMD[:, :, tile.k],
                out_BNLD[:, :, tile.q],
                lse_BNL[:, :, tile.q].contiguous(),
                0.0,
                tile.band.kind == "causal",
                attn_mask=mask,
                scale=scale,
            )
            dq_part, dk_part, dv_part = (part_BNLD.transpose(1, 2) for part_BNLD in parts_BNLD)
            dq_BLND[:, tile.q] = dq_part
            dk_BMND[:, tile.k] += dk_part
            dv_BMND[:, tile.k] += dv_part
        return dq_BLND, sum_heads(dk_BMND, kv_heads), sum_heads(dv_BMND, kv_heads)


KERNEL = CpuKernel()
