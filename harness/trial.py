"""A trial: one point of a sweep, planned but not yet run. Pure data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from engine.settings import TrialSettings, to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One combination of settings, with the reason when it cannot run."""

    experiment: str
    title: str
    settings: TrialSettings
    deadline_seconds: float
    refusal: str | None = None
    # No part of the id:
    share_ranks: bool = False  # whether the ranks of the trial before it may run it
    profile: bool = False  # whether one of its steps is traced

    @property
    def id(self) -> str:
        """Readable and unique: task, method, length, CP size, and a digest of all settings (the key of `--resume`).

        The model's note is left out: rewording it makes no other trial.
        """
        settings = self.settings
        values = to_json(settings)
        del values["model"]["note"]
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
        return f"{settings.task}-{settings.method}-s{settings.seq_len}-cp{settings.cp_size}-{digest}"
