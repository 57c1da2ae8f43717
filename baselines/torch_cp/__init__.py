"""torch's own context parallelism on the engine's model: its ring as torch ships it, around the engine's kernels.

Source: `torch.distributed.tensor.experimental` of torch itself. The public `context_parallel` replaces scaled
dot-product attention and fails on CPUs; the functions behind it, which run here, run anywhere. They know full and
causal masks, the latter load-balanced over zigzag shards.

Differences from the original. The engine's kernels replace torch's flash attention. float64 inputs are summed in
float64. Outputs that a checkpoint keeps in part are computed again whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.ring_baseline import fixed_settings_unsupported_reason
from engine.attention.geometry.layout import split_unsupported_reason
from engine.attention.resolve import Choices, trial_choices
from engine.method import EngineCommand

if TYPE_CHECKING:
    from engine.attention.algorithms.saved import AttentionFn
    from engine.attention.context import ContextParallel
    from engine.settings import TrialSettings


class TorchContextParallel(EngineCommand):
    """K and V are gathered, their gradients go around the ring in fp32."""

    name = "torch_cp"
    system = "torch"
    source = "github.com/pytorch/pytorch"

    def refuse(self, settings: TrialSettings) -> str | None:
        if settings.tp_size > 1:
            return f"torch_cp runs without tensor parallelism, found tp_size {settings.tp_size}; set tp_size to 1"
        for mask in settings.masks:
            if mask not in ("causal", "full"):
                return f"torch_cp knows the masks full and causal, found {mask}; choose one of them"
        if settings.model.sinks:
            return f"torch_cp has no sinks, which model {settings.model.name} has; choose a model without them"
        if settings.model.kv_latent:
            return f"torch_cp has no latent attention, which model {settings.model.name} has; choose a model without it"
        if settings.grad_comm_dtype not in ("auto", "fp32"):
            return (
                f"torch_cp always sends gradients in fp32, found grad_comm_dtype {settings.grad_comm_dtype}; set it to "
                "auto or fp32"
            )
        layout = self.layout(settings)
        fixed: dict[str, str | None] = {
            "layout": layout,
            "schedule": "ring",
            "backward": "key_value",
            "exchange": None,
        }
        return fixed_settings_unsupported_reason(settings, fixed) or split_unsupported_reason(
            layout, settings.seq_len, settings.cp_size
        )

    def layout(self, settings: TrialSettings) -> str:
        return "zigzag" if settings.mask == "causal" else "contiguous"  # load balancing is for causal masks alone

    def choices(self, settings: TrialSettings) -> Choices:
        return trial_choices(settings)._replace(schedule="ring", backward="key_value", exchange="relay")

    def attention(self, cp: ContextParallel, settings: TrialSettings, mask: str | None = None) -> AttentionFn:
        if cp.size == 1:
            from engine.attention.bound import BoundAttention

            return BoundAttention(cp, settings, self.choices(settings), mask)
        from baselines.torch_cp.attention import TorchRing

        return TorchRing(cp, settings)


METHOD = TorchContextParallel()
