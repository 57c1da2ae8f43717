"""Cut Cross-Entropy (arXiv:2411.09009) behind the engine's call.

Logits live in a kernel's registers only: once in forward for the log-partition, once more in backward for the
gradients. As shipped, backward leaves out blocks of the logits' gradient that are all below 2^-12, a part of what bf16
tells from 1, and sums both gradients in the inputs' dtype.
"""

from __future__ import annotations

from torch import Tensor

from engine.lm_head.fused import fused_loss_sum
from engine.lm_head.plain import IGNORE


def cce_loss_sum(hidden_TE: Tensor, weight_VE: Tensor, labels_T: Tensor) -> Tensor:
    """`engine.lm_head.plain.plain_loss_sum` without z-loss, by cut-cross-entropy; bf16 on a GPU only."""
    from cut_cross_entropy import linear_cross_entropy

    if not bool((labels_T != IGNORE).any()):  # the library drops ignored tokens, and knows no kernel over none
        return fused_loss_sum(hidden_TE, weight_VE, labels_T)
    loss: Tensor = linear_cross_entropy(hidden_TE, weight_VE, labels_T, ignore_index=IGNORE, reduction="sum")
    return loss
