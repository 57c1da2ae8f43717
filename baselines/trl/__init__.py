"""TRL's supervised trainer with Liger-Kernel around a Llama of transformers: what most users train with on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
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
    recomputes: Mapping[str, str] = {"offload": "offload"}  # recomputes each layer, its inputs in host memory

    def request(self, settings: TrialSettings, trial_dir: Path) -> dict[str, object]:
        offload = settings.checkpoint.upstream == "offload"
        return super().request(settings, trial_dir) | {"output": str(trial_dir / "trl"), "offload": offload}


METHOD = TRL()
