"""Plans of attention with choices by keyword, as a user gives them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from engine.attention import plan
from engine.attention.algorithms.saved import AttentionPlan
from engine.attention.context import ContextParallel
from engine.attention.masks import Mask
from engine.attention.resolve import Choices


def plan_attention(
    q_BLND: Tensor,
    k_BLKD: Tensor,
    v_BLKD: Tensor | None = None,
    *,
    mask: Mask,
    cp: ContextParallel,
    expand_NXC: Tensor | None = None,
    **choices: Any,
) -> AttentionPlan:
    v_BLKD = k_BLKD if v_BLKD is None else v_BLKD
    return plan.plan_attention(q_BLND, k_BLKD, v_BLKD, expand_NXC, mask, cp, Choices(**choices))
