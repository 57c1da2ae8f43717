"""Kernel `cpu`: torch's own flash attention for CPUs, whose backward takes an external LSE.

The op aligns its causal mask top-left; other bands go in as an additive mask of one tile. Inputs narrower than fp32 are
widened first, so that partial results are not rounded before they are summed: the error of a bf16 run is then the same
on any number of ranks. The op is as fast either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.kernels import BackwardInputs, Gradients, Problem
from engine.attention.kernels.heads import repeat_heads, sum_heads
from engine.attention.kernels.stand_in import output_stand_in
from engine.attention.merge import accumulation_dtype
from engine.attention.tiles import Band

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _additive(band: Band, rows: int, columns: int, dtype: torch.dtype) -> Tensor | None:
    """The band as an additive mask, or None when the op's own causal flag says it all."""
    if band.kind != "band":
        return None
    offset = torch.arange(columns) - torch.arange(rows)[:, None]
    hidden = torch.zeros_like(offset, dtype=torch.bool)
    if band.lo is not None:
        hidden |= offset < band.lo
    if band.hi is not None:
        hidden |= offset > band.hi
    return torch.zeros(rows, columns, dtype=dtype).masked_fill_(hidden, -torch.inf)


def _heads_first(tensor_BLND: Tensor) -> Tensor:
    return tensor_BLND.to(accumulation_dtype(tensor_BLND.dtype)).transpose(1, 2)


class CpuKernel:
    """aten::_scaled_dot_product_flash_attention_for_cpu, forward and backward."""

    name = "cpu"
    writes_input_dtype = False
    takes_delta = False

    def missing(self) -> str | None:
        return None

    def refuse(self, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return f"kernel cpu runs on CPU tensors, found {problem.device.type}; choose kernel auto"
        return None

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor]:
        heads = q_BLND.shape[2]
        out_BNLD, lse_BNL = _forward(
            _heads_first(q_BLND),
            _heads_first(repeat_heads(k_BMKD, heads)),
            _heads_first(repeat_heads(v_BMKD, heads)),
            0.0,
            band.kind == "causal",
            attn_mask=_additive(band, q_BLND.shape[1], k_BMKD.shape[1], accumulation_dtype(q_BLND.dtype)),
            scale=scale,
        )
        return out_BNLD.transpose(1, 2), lse_BNL

    def backward(self, given: BackwardInputs, band: Band, scale: float, deterministic: bool) -> Gradients:
        q_BLND, dout_BLND, lse_BNL, delta_BNL, k_BMKD, v_BMKD = given
        heads, kv_heads = q_BLND.shape[2], k_BMKD.shape[2]
        wide = accumulation_dtype(q_BLND.dtype)
        dout_BLND = dout_BLND.to(wide)
        dq_BNLD, dk_BNMD, dv_BNMD = _backward(
            dout_BLND.transpose(1, 2),
            _heads_first(q_BLND),
            _heads_first(repeat_heads(k_BMKD, heads)),
            _heads_first(repeat_heads(v_BMKD, heads)),
            output_stand_in(dout_BLND, delta_BNL).transpose(1, 2),
            lse_BNL.contiguous(),
            0.0,
            band.kind == "causal",
            attn_mask=_additive(band, q_BLND.shape[1], k_BMKD.shape[1], wide),
            scale=scale,
        )
        return (
            dq_BNLD.transpose(1, 2),
            sum_heads(dk_BNMD.transpose(1, 2), kv_heads),
            sum_heads(dv_BNMD.transpose(1, 2), kv_heads),
        )


KERNEL = CpuKernel()
