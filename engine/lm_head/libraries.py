"""Two libraries behind the engine's call, as they ship.

Cut Cross-Entropy (arXiv:2411.09009): logits exist in a kernel's registers only, once in forward for the log-partition
and once more in backward for the gradients. Its backward leaves out blocks of the logits' gradient that are all below
2^-12, a part of what bf16 tells from 1, and sums both gradients in the inputs' dtype.

Liger Kernel (arXiv:2410.10989): logits of a run of tokens in the inputs' dtype, gradients formed in the forward pass in
their place. The weight gradient is summed in fp32, as in `fused`. Its backward scales the saved gradients in place, so
backward may run only once.
"""

from __future__ import annotations

from torch import Tensor

from engine.lm_head.fused import fused_loss_sum
from engine.lm_head.plain import IGNORE
from engine.ops.autograd import accumulation_dtype


def cce_loss_sum(hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor) -> Tensor:
    """`engine.lm_head.plain.plain_loss_sum` without z-loss, by cut-cross-entropy; bf16 on a GPU only."""
    from cut_cross_entropy import linear_cross_entropy

    if not bool((labels_T != IGNORE).any()):  # the library drops ignored tokens, and knows no kernel over none
        return fused_loss_sum(hidden_TE, weight_VE, labels_T)
    labels_T = labels_T.to(hidden_TE.device, non_blocking=True)
    loss: Tensor = linear_cross_entropy(hidden_TE, weight_VE, labels_T, ignore_index=IGNORE, reduction="sum")
    return loss


def liger_loss_sum(hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor, z_loss: float = 0.0) -> Tensor:
    """`engine.lm_head.plain.plain_loss_sum` by liger-kernel; without gradients where neither input requires them."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss_of = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE, lse_square_scale=z_loss, reduction="sum", accum_dtype=accumulation_dtype(weight_VE.dtype)
    )
    loss: Tensor = loss_of(weight_VE, hidden_TE, labels_T.to(hidden_TE.device, non_blocking=True))
    return loss
