"""Liger Kernel's fused linear cross entropy (arXiv:2410.10989) behind the engine's call.

Logits of a run of tokens in the inputs' dtype, gradients formed in the forward pass in their place. The weight
gradient is summed in fp32, as ours is. Its backward scales the saved gradients in place, so it may come only once.
"""

from __future__ import annotations

from torch import Tensor

from engine.lm_head.plain import IGNORE, wide


def liger_loss_sum(hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, z_loss: float = 0.0) -> Tensor:
    """`engine.lm_head.plain.plain_loss_sum` by liger-kernel; without gradients where neither input asks for them."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss_of = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE, lse_square_scale=z_loss, reduction="sum", accum_dtype=wide(weight_VE)
    )
    loss: Tensor = loss_of(weight_VE, hidden_TE, labels_T)
    return loss
