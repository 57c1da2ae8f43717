"""Warm-up steps on sequences shorter than the trial's own."""

from __future__ import annotations

from engine.attention.geometry.layout import Layout, split_unsupported_reason
from engine.attention.masks import parse_mask
from engine.settings import TrialSettings


def warm_up_unsupported_reason(settings: TrialSettings, layout: str | Layout | None) -> str | None:
    """Why steps of `steps.warmup_seq_len` tokens cannot be run, or None. `layout`: the trial's own, by which shorter
    sequences are split too; None where the method does not tell."""
    seq_len = settings.steps.warmup_seq_len
    if settings.task != "train" or seq_len in (0, settings.seq_len) or not settings.steps.warmup:
        return None
    reason = parse_mask(settings.mask).unsupported_reason(seq_len)
    if reason is None and layout is not None:
        reason = split_unsupported_reason(layout, seq_len, settings.cp_size)
    return reason and f"steps.warmup_seq_len {seq_len} cannot be run: {reason}; 0 warms up at the trial's own length"
