"""Kernel `fa2`: torch's own FlashAttention-2 op (arXiv:2307.08691), for Ampere GPUs such as A100 and A800.

It takes one head dim: a narrower V is padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.geometry.tiles import VarlenGroup, Visible
from engine.attention.kernels import (
    Gradients,
    KernelProblem,
    WholeInputs,
    gpu_unsupported_reason,
    half_precision_unsupported_reason,
    torch_op_unsupported_reason,
)
from engine.attention.kernels.padded import padded_backward, padded_forward
from engine.attention.kernels.sequences import Packed
from engine.attention.kernels.stand_in import StandInKernel

_forward = torch.ops.aten._scaled_dot_product_flash_attention
_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
# The same kernels with cumulative lengths: tensors [tokens, heads, head_dim], LSE [heads, tokens].
_packed_forward = torch.ops.aten._flash_attention_forward
_packed_backward = torch.ops.aten._flash_attention_backward


def _lengths(packed: Packed) -> tuple[Tensor, Tensor, int, int]:
    """Cumulative and greatest lengths, as the operations take them. Where every sequence has one query, they would take
    another kernel, for decoding, whose LSE has another shape: the greatest length is an upper bound."""
    queries, keys = packed.queries, packed.keys
    return queries.bounds, keys.bounds, max(2, queries.longest), keys.longest


@dataclass(frozen=True)
class FlashAttention2Kernel(StandInKernel):
    """aten::_scaled_dot_product_flash_attention, forward and backward."""

    name = "fa2"
    takes_sequences = True
    writes_input_dtype = True

    def unsupported_reason(self) -> str | None:
        return gpu_unsupported_reason(self.name, (8, 0))

    def refuse(self, problem: KernelProblem) -> str | None:
        if problem.deterministic:
            return "kernel fa2 adds dQ with atomics in an order that varies; choose fa4 or reference for deterministic"
        return half_precision_unsupported_reason(self.name, problem) or torch_op_unsupported_reason(self.name, problem)

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, visible: Visible, scale: float
    ) -> tuple[Tensor, Tensor]:
        if q_BLND.shape[-1] != v_BMKD.shape[-1]:
            return padded_forward(self, q_BLND, k_BMKD, v_BMKD, visible, scale)
        if isinstance(visible, VarlenGroup):
            packed, batch = Packed.of(visible, q_BLND, k_BMKD), q_BLND.shape[0]
            out_TND, lse_NT, *_ = _packed_forward(
                *packed.side_by_side(q_BLND, k_BMKD, v_BMKD),
                *_lengths(packed),
                0.0,
                visible.kind == "causal",
                False,
                scale=scale,
            )
            return packed.queries.restored(out_TND, batch), packed.queries.restored_rows(lse_NT, batch)
        out_BNLD, lse_BNL, *_ = _forward(
            q_BLND.transpose(1, 2),
            k_BMKD.transpose(1, 2),
            v_BMKD.transpose(1, 2),
            0.0,
            visible.kind == "causal",
            scale=scale,
        )
        return out_BNLD.transpose(1, 2), lse_BNL

    def backward_of_whole(self, given: WholeInputs, visible: Visible, scale: float, deterministic: bool) -> Gradients:
        if given.q_BLND.shape[-1] != given.v_BLKD.shape[-1]:
            return padded_backward(given, lambda one: self.backward_of_whole(one, visible, scale, deterministic))
        q_BLND, out_BLND, dout_BLND, lse_BNL, k_BMKD, v_BMKD = given
        unused = torch.empty(0, dtype=torch.uint64, device=q_BLND.device)  # dropout's random state; there is none
        if isinstance(visible, VarlenGroup):
            packed, batch = Packed.of(visible, q_BLND, k_BMKD), q_BLND.shape[0]
            queries, keys = packed.queries, packed.keys
            dq_TND, dk_TKD, dv_TKD = _packed_backward(
                queries.packed(dout_BLND),
                *packed.side_by_side(q_BLND, k_BMKD, v_BMKD),
                queries.packed(out_BLND),
                queries.packed_rows(lse_BNL),
                *_lengths(packed),
                0.0,
                visible.kind == "causal",
                unused,
                unused,
                scale=scale,
            )
            return queries.restored(dq_TND, batch), keys.restored(dk_TKD, batch), keys.restored(dv_TKD, batch)
        dq_BNLD, dk_BKMD, dv_BKMD = _backward(
            dout_BLND.transpose(1, 2),
            q_BLND.transpose(1, 2),
            k_BMKD.transpose(1, 2),
            v_BMKD.transpose(1, 2),
            out_BLND.transpose(1, 2),
            lse_BNL.contiguous(),
            None,
            None,
            q_BLND.shape[1],
            k_BMKD.shape[1],
            0.0,
            visible.kind == "causal",
            unused,
            unused,
            scale=scale,
        )
        return dq_BNLD.transpose(1, 2), dk_BKMD.transpose(1, 2), dv_BKMD.transpose(1, 2)


KERNEL = FlashAttention2Kernel()
