"""What systems share that train a Llama of transformers on one process per rank: their settings and their program.

`baselines/programs/train_transformers.py` runs all of them; its `engine` says under which trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from baselines.called import kernel_reason, parse_program, render_program, training_request, transformers_kernel
from baselines.install.places import InstallPlace
from baselines.upstream import PrintedSteps, Rendered, Upstream

if TYPE_CHECKING:
    from engine.settings import TrialSettings

PROGRAM = "train_transformers.py"


def llama_reason(upstream: Upstream, settings: TrialSettings) -> str | None:
    """Why a Llama of transformers cannot run the trial's kernel, recomputation or model, or None."""
    model, checkpoint = settings.model, settings.checkpoint
    if (reason := kernel_reason(upstream, settings)) is not None:
        return reason
    if checkpoint.every not in (0, 1) or (checkpoint.every and checkpoint.tail):
        return (
            f"{upstream.name} recomputes nothing or each layer whole, found checkpoint.every {checkpoint.every} and "
            f"tail {checkpoint.tail:g}; set every to 0, or every to 1 and tail to 0"
        )
    if not model.gated or model.qk_norm:
        return f"{upstream.name} trains transformers' Llama, and {model.name} is another model; choose a Llama"
    return None


class WholeSequences(Upstream):
    """Whole sequences on each rank. `kernel` is that of transformers' attention."""

    honours = ("kernel",)
    tokens = "plain"
    engine: str  # of the program

    def own_reason(self, settings: TrialSettings) -> str | None:
        if settings.cp_size > 1:
            return f"{self.name} keeps sequences whole, found cp_size {settings.cp_size}; set cp_size to 1"
        return llama_reason(self, settings)

    def request(self, settings: TrialSettings, trial_dir: Path) -> dict[str, object]:
        """The trial for the program; adapters add what their engine reads."""
        return training_request(settings, self.steps(settings), trial_dir) | {"engine": self.engine}

    def render(self, settings: TrialSettings, trial_dir: Path, place: InstallPlace) -> Rendered:
        return render_program(PROGRAM, self.request(settings, trial_dir), trial_dir, place)

    def parse(self, output: str) -> PrintedSteps:
        return parse_program(output)

    def kernel(self, settings: TrialSettings, place: InstallPlace, environment: Mapping[str, str]) -> str:
        return transformers_kernel(settings)
