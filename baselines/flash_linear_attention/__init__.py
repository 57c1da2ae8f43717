"""flash-linear-attention's own call on one GPU: what its layers make of the same tensors, and the bound of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.method import EngineCommand

if TYPE_CHECKING:
    from engine.linear.shard import LinearShard, Recurrence
    from engine.settings import Task, TrialSettings


class FlashLinearAttention(EngineCommand):
    """The recurrence of whole sequences, of one document or many."""

    name = "flash_linear_attention"
    system = "flash-linear-attention"
    source = "github.com/fla-org/flash-linear-attention"
    tasks: tuple[Task, ...] = ("linear",)
    most_cp = 1

    def refuse(self, settings: TrialSettings) -> str | None:
        if settings.task not in self.tasks:
            return f"{self.name} is one call of a recurrence, found task {settings.task}; set task to linear"
        if settings.cp_size > self.most_cp:
            return f"{self.name} takes whole sequences, found cp_size {settings.cp_size}; set cp_size to 1"
        if settings.dtype != "bf16":
            return f"{self.name} computes in 16 bits, found dtype {settings.dtype}; set dtype to bf16"
        return None

    def unavailable(self, device: str, kernel: str = "auto") -> str | None:
        """Why the ranks here cannot run it. A plan for other machines is made where there is no GPU."""
        if device != "cuda":
            return f"{self.name} has kernels for GPUs alone, and the ranks here use CPUs; run it on GPUs"
        import torch

        from engine.linear.kernels import library_installed, refused_here

        if torch.cuda.is_available() and not library_installed():
            return f"{self.name} calls a library that is missing or before 0.6; pip install flash-linear-attention"
        return refused_here() or None

    def layout(self, settings: TrialSettings) -> str:
        return "contiguous"

    def recurrence(self, shard: LinearShard) -> Recurrence:
        from baselines.flash_linear_attention.recurrence import plain_call

        return plain_call(shard.runs)


METHOD = FlashLinearAttention()
