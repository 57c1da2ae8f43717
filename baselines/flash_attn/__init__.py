"""FlashAttention's own call on one rank: what a user writes who needs no context parallelism, and the bound of ours.

On GPUs it is `flash_attn_func` of FlashAttention-4, and for packed documents `flash_attn_varlen_func`. On CPUs, where
the library does not run, torch's scaled_dot_product_attention of one document after another stands for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.ring_baseline import fixed_settings_unsupported_reason
from engine.attention.masks import Causal, Documents, Full, parse_mask
from engine.method import EngineCommand

if TYPE_CHECKING:
    from engine.attention.algorithms.saved import AttentionFn
    from engine.attention.context import ContextParallel
    from engine.settings import Task, TrialSettings


class FlashAttention(EngineCommand):
    """Attention alone of whole sequences, causal or full, in one document or many."""

    name = "flash_attn"
    system = "FlashAttention"
    source = "github.com/Dao-AILab/flash-attention"
    tasks: tuple[Task, ...] = ("attention",)
    most_cp = 1

    def refuse(self, settings: TrialSettings) -> str | None:
        if settings.task not in self.tasks:
            return f"flash_attn is one call of attention, found task {settings.task}; set task to attention"
        for name in ("cp_size", "tp_size"):
            if (ranks := getattr(settings, name)) > self.most_cp:
                return f"flash_attn attends to whole sequences, found {name} {ranks}; set {name} to 1"
        if settings.kernel not in ("auto", "fa4"):
            return f"flash_attn calls FlashAttention-4, found kernel {settings.kernel}; set kernel to auto or fa4"
        mask = parse_mask(settings.mask)
        plain = isinstance(mask, Documents) and mask.left is None and not mask.spans
        if not plain and mask not in (Causal(), Full()):
            return (
                f"flash_attn attends with masks causal, full and documents:LENGTHS, found {settings.mask}; choose one "
                "of them"
            )
        if settings.model.sinks:
            return f"flash_attn has no sinks, which model {settings.model.name} has; choose a model without them"
        if settings.model.kv_latent:
            return (
                f"flash_attn has no latent attention, which model {settings.model.name} has; choose a model without it"
            )
        names = ("layout", "schedule", "backward", "exchange")
        return fixed_settings_unsupported_reason(settings, dict.fromkeys(names))

    def unavailable(self, device: str, kernel: str = "auto") -> str | None:
        """Why the GPUs here cannot run it: the library is not there, or they are too old for it. A plan for other
        machines is made where there is no GPU."""
        import torch

        from engine.attention.kernels import kernel_named

        return kernel_named("fa4").unsupported_reason() if device == "cuda" and torch.cuda.is_available() else None

    def layout(self, settings: TrialSettings) -> str:
        return "contiguous"

    def attention(self, cp: ContextParallel, settings: TrialSettings, mask: str | None = None) -> AttentionFn:
        from baselines.flash_attn.attention import PlainCall

        return PlainCall(settings)


METHOD = FlashAttention()
