"""DeepSpeed as its authors ship it: Ulysses' attention alone, or ZeRO-3 with ALST around a Llama of transformers.

`task: attention` calls DistributedAttention around torch's own attention. `task: train` runs UlyssesSPAttentionHF under
ZeRO-3, with the loss and, with `mlp_tiles`, the MLP in tiles; on GPUs Liger-Kernel computes norms, rotary embedding and
the untiled MLP, as in ALST's evaluation. `checkpoint.upstream: offload` moves layers' inputs to the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from baselines.called import UpstreamAttention, render_program
from baselines.install.places import InstallPlace
from baselines.transformers import PROGRAM, model_reason, transformers_kernel, transformers_request
from baselines.upstream import Rendered
from engine.attention.geometry.layout import split_unsupported_reason

if TYPE_CHECKING:
    from engine.settings import TrialSettings

_LOSS_TILE_TOKENS = 4096  # of a rank's tokens whose logits exist at once


class DeepSpeed(UpstreamAttention):
    """Each rank attends over the whole sequence with its share of the heads."""

    name = "deepspeed_upstream"
    package = "deepspeed"
    system = "DeepSpeed"
    source = "arXiv:2309.14509, arXiv:2506.13996"
    tasks = ("train", "attention")
    dtypes = ("bf16", "fp32")
    honours = ("kernel", "mlp_tiles", "optimizer_offload")
    offloads_parts = True
    fa4_beside_torch = True
    tokens = "plain"
    recomputes: Mapping[str, str] = {"offload": "offload"}  # recomputes each layer, its inputs in host memory

    def own_reason(self, settings: TrialSettings) -> str | None:
        model, cp_size = settings.model, settings.cp_size
        # Few KV heads are repeated by UlyssesSPAttentionHF; DistributedAttention asserts that each rank gets one.
        checked = (("query", model.heads), ("KV", model.kv_heads))
        for label, heads in checked:
            if heads % cp_size and not (label == "KV" and settings.task == "train" and cp_size % heads == 0):
                return (
                    f"{self.name} needs {label} heads divisible by cp_size, found {heads} heads of model {model.name} "
                    f"and cp_size {cp_size}; choose a cp_size that divides {heads}"
                )
        if settings.task == "train":
            if (reason := model_reason(self, settings)) is not None:
                return reason
            if settings.checkpoint.upstream == "offload" and not settings.checkpoint.every:
                return (
                    f"{self.name} moves the inputs of recomputed layers, found checkpoint.upstream offload and "
                    "checkpoint.every 0; set every to 1"
                )
        elif settings.checkpoint.upstream != "default":
            return (
                f"{self.name} recomputes in task train alone, found task {settings.task}; leave checkpoint.upstream out"
            )
        elif settings.kernel != "auto":
            return f"{self.name} attends with torch's own kernel, found kernel {settings.kernel}; set kernel to auto"
        elif settings.world_size != cp_size:
            return f"{self.name} runs one sequence, found world_size {settings.world_size}; set it to cp_size {cp_size}"
        return split_unsupported_reason("contiguous", settings.seq_len, cp_size)

    def render(self, settings: TrialSettings, trial_dir: Path, place: InstallPlace) -> Rendered:
        if settings.task == "attention":
            return super().render(settings, trial_dir, place)
        return render_program(PROGRAM, self.training(settings, trial_dir), trial_dir, place)

    def training(self, settings: TrialSettings, trial_dir: Path) -> dict[str, object]:
        """A trial of `task: train` for the program."""
        local = settings.seq_len // settings.cp_size
        return transformers_request(settings, self.steps(settings), trial_dir) | {
            "engine": "deepspeed",
            "loss_tiles": max(1, local // _LOSS_TILE_TOKENS),
            "mlp_tiles": settings.mlp_tiles,
            "offload": settings.checkpoint.upstream == "offload",
            "deepspeed": zero_config(settings),
        }

    def kernel(self, settings: TrialSettings, place: InstallPlace, environment: Mapping[str, str]) -> str:
        return transformers_kernel(settings)


def zero_config(settings: TrialSettings) -> dict[str, object]:
    """DeepSpeed's configuration: ZeRO-3 over all ranks, AdamW, on the host with `optimizer_offload`."""
    zero: dict[str, object] = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
    if settings.optimizer_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, "ratio": float(settings.optimizer_offload)}
    optimizer = {
        "lr": settings.learning_rate,
        "betas": [0.9, 0.95],
        "weight_decay": 0.1,
        # On the GPU torch's fused AdamW: DeepSpeed's own does the same, and would have to be compiled.
        **({} if settings.optimizer_offload else {"torch_adam": True, "fused": True}),
    }
    return {
        "train_micro_batch_size_per_gpu": settings.batch_size,
        "train_batch_size": settings.batch_size * settings.dp_size,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1 << 30,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": optimizer},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": settings.dtype == "bf16"},
        "sequence_parallel_size": settings.cp_size,
    }


METHOD = DeepSpeed()
