"""Kernel `cudnn`: cuDNN's fused attention through torch's own op. Needs nothing but torch, on Ampere and newer.

Head dims up to 128; that of V may be its own, so 192 and 128 are refused and 128 and 64 are not (unmeasured).
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
from engine.attention.kernels.sequences import backward_each, forward_each
from engine.attention.kernels.stand_in import StandInKernel

_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


@dataclass(frozen=True)
class CudnnKernel(StandInKernel):
    """aten::_scaled_dot_product_cudnn_attention, forward and backward. Its LSE has a trailing axis of size 1."""

    name = "cudnn"
    writes_input_dtype = True

    def unsupported_reason(self) -> str | None:
        unsupported_reason = gpu_unsupported_reason(self.name, (8, 0))
        if unsupported_reason is None and not torch.backends.cudnn.is_available():
            return "kernel cudnn needs a torch built with cuDNN and this one is not; choose kernel auto"
        return unsupported_reason

    def refuse(self, problem: KernelProblem) -> str | None:
        if problem.deterministic:
            return "kernel cudnn through torch offers no deterministic backward; choose fa4 or reference"
        return half_precision_unsupported_reason(self.name, problem) or torch_op_unsupported_reason(self.name, problem)

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, visible: Visible, scale: float
    ) -> tuple[Tensor, Tensor]:
        if isinstance(visible, VarlenGroup):
            return forward_each(self, q_BLND, k_BMKD, v_BMKD, visible, scale)
        out_BNLD, lse, *_ = _forward(
            q_BLND.transpose(1, 2),
            k_BMKD.transpose(1, 2),
            v_BMKD.transpose(1, 2),
            None,
            True,
            0.0,
            visible.kind == "causal",
            scale=scale,
        )
        return out_BNLD.transpose(1, 2), lse.view(lse.shape[:3])

    def backward_of_whole(self, given: WholeInputs, visible: Visible, scale: float, deterministic: bool) -> Gradients:
        if isinstance(visible, VarlenGroup):
            return backward_each(
                given, visible, lambda one, band: self.backward_of_whole(one, band, scale, deterministic)
            )
        q_BLND, out_BLND, dout_BLND, lse_BNL, k_BMKD, v_BMKD = given
        unused = torch.empty((), dtype=torch.int64, device=q_BLND.device)  # dropout's random state; there is none
        dq_BNLD, dk_BKMD, dv_BKMD = _backward(
            dout_BLND.transpose(1, 2),
            q_BLND.transpose(1, 2),
            k_BMKD.transpose(1, 2),
            v_BMKD.transpose(1, 2),
            out_BLND.transpose(1, 2),
            lse_BNL.contiguous().unsqueeze(-1),
            unused,
            unused,
            None,
            None,
            None,
            q_BLND.shape[1],
            k_BMKD.shape[1],
            0.0,
            visible.kind == "causal",
            scale=scale,
        )
        return dq_BNLD.transpose(1, 2), dk_BKMD.transpose(1, 2), dv_BKMD.transpose(1, 2)


KERNEL = CudnnKernel()
