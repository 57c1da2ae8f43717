"""TRL's supervised trainer with Liger-Kernel around a Llama of transformers: what most users train with on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from baselines.transformers import WholeSequences

if TYPE_CHECKING:
    from engine.settings import TrialSettings


class TRL(WholeSequences):
    """Ranks are data-parallel."""

    name = "trl_upstream"
    package = "trl"
    system = "TRL + Liger-Kernel"
    source = "github.com/huggingface/trl"
    engine = "trl"

    def request(self, settings: TrialSettings, trial_dir: Path) -> dict[str, object]:
        return super().request(settings, trial_dir) | {"output": str(trial_dir / "trl")}


METHOD = TRL()
