"""ring-flash-attention as a method, installed in the folder that SOME_SYSTEMS names or in its own."""

from __future__ import annotations

import os
from pathlib import Path

from baselines.install.places import InstallPlace
from baselines.ring_flash_attn import RingFlashAttention


class Elsewhere(RingFlashAttention):
    @property
    def places(self) -> list[InstallPlace]:
        there = InstallPlace(system=self.package, flavour="current", base=Path(os.environ["SOME_SYSTEMS"]))
        return [there] if (there.base / self.package / "pin.yaml").exists() else super().places


METHOD = Elsewhere()
