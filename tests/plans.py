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
    q_BLND: Tensor, k_BLKD: Tensor, *, mask: Mask, cp: ContextParallel, value_dim: int | None = None, **choices: Any
) -> AttentionPlan:
    return plan.plan_attention(q_BLND, k_BLKD, value_dim or k_BLKD.shape[-1], mask, cp, Choices(**choices))
