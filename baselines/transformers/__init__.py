"""transformers' Llama with Liger-Kernel in a plain training loop on one GPU, weights in fp32 under autocast.

What a user writes who wants no trainer: the model with Liger's kernels in it, gradient checkpointing, torch's fused
AdamW, and autocast to bf16. `transformers_bf16` beside it has the weights themselves in bf16, which takes half the
memory for them and rounds each update. Liger's kernels are of GPUs: a CPU rank runs the model without them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from baselines.llama_trainers import WholeSequences

if TYPE_CHECKING:
    from engine.settings import TrialSettings


class Transformers(WholeSequences):
    """`dtype` is that of the products: bf16 by autocast, or fp32."""

    name = "transformers_upstream"
    package = "transformers"
    system = "transformers + Liger-Kernel"
    source = "github.com/huggingface/transformers, github.com/linkedin/Liger-Kernel"
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    engine = "plain"
    weights: Literal["fp32", "bf16"] = "fp32"  # dtype of the parameters, and so of their gradients and Adam's moments

    def own_reason(self, settings: TrialSettings) -> str | None:
        if settings.world_size > settings.cp_size:
            return f"{self.name} runs on one rank, found world_size {settings.world_size}; set world_size to 1"
        return super().own_reason(settings)

    def request(self, settings: TrialSettings, trial_dir: Path) -> dict[str, object]:
        dtypes = {"weights": self.weights, "products": settings.dtype}
        return super().request(settings, trial_dir) | dtypes


METHOD = Transformers()
