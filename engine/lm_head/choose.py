"""The LM head's loss for the settings of a trial."""

from __future__ import annotations

import functools

from engine.lm_head.fused import fused_loss_sum
from engine.lm_head.libraries import cce_loss_sum, liger_loss_sum
from engine.lm_head.loss_kernel import unsupported_reason
from engine.lm_head.plain import LossSum, plain_loss_sum
from engine.settings import TrialSettings


def loss_sum_of(settings: TrialSettings, device_type: str) -> LossSum:
    """(hidden_TE, weight_VE, labels_T) -> sum of this rank's losses, z-loss included; `device_type` is cuda or cpu.

    Raises ValueError with one sentence when that device or this machine cannot run the setting.
    """
    reason = unsupported_reason(settings, device_type)
    if reason:
        raise ValueError(reason)
    if not settings.lm_head_fusion:
        return functools.partial(plain_loss_sum, z_loss=settings.z_loss)
    if settings.loss_kernel == "cce":
        return cce_loss_sum  # a z-loss has been refused
    if settings.loss_kernel == "liger":
        return functools.partial(liger_loss_sum, z_loss=settings.z_loss)
    return functools.partial(fused_loss_sum, z_loss=settings.z_loss, tiles=settings.head_tiles)
