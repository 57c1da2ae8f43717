"""TRL's supervised trainer with Liger-Kernel around a Llama of transformers: what most users train with on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from baselines.called import kernel_reason, parse_program, render_program, training_request, transformers_kernel
from baselines.install.places import Place
from baselines.upstream import Printed, Rendered, Upstream

if TYPE_CHECKING:
    from engine.settings import TrialSettings


class TRL(Upstream):
    """Whole sequences on each rank; ranks are data-parallel. `kernel` is that of transformers' attention."""

    name = "trl_upstream"
    package = "trl"
    system = "TRL + Liger-Kernel"
    source = "github.com/huggingface/trl"
    honours = ("kernel",)
    tokens = "plain"

    def own_reason(self, settings: TrialSettings) -> str | None:
        model, checkpoint = settings.model, settings.checkpoint
        if settings.cp_size > 1:
            return f"{self.name} keeps sequences whole, found cp_size {settings.cp_size}; set cp_size to 1"
        if checkpoint.every not in (0, 1) or (checkpoint.every and checkpoint.tail):
            return (
                f"{self.name} recomputes nothing or each layer whole, found checkpoint.every {checkpoint.every} and "
                f"tail {checkpoint.tail:g}; set every to 0, or every to 1 and tail to 0"
            )
        if (reason := kernel_reason(self, settings)) is not None:
            return reason
        if not model.gated or model.qk_norm:
            return f"{self.name} trains transformers' Llama, and {model.name} is another model; choose a Llama"
        return None

    def render(self, settings: TrialSettings, trial_dir: Path, place: Place) -> Rendered:
        request = training_request(settings, self.steps(settings), trial_dir)
        request |= {"engine": "trl", "output": str(trial_dir / "trl")}
        return render_program("train_transformers.py", request, trial_dir, place)

    def parse(self, output: str) -> Printed:
        return parse_program(output)

    def kernel(self, settings: TrialSettings, place: Place, environment: Mapping[str, str]) -> str:
        return transformers_kernel(settings)


METHOD = TRL()
