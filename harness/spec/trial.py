"""A trial: one point of a sweep, planned but not yet run. Pure data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from engine.checkpoint.planning.memory_settings import PLANNABLE
from engine.lora import Lora
from engine.measurement import Forecast
from engine.settings import Checkpoint, Steps, TrialSettings
from engine.shape import ModelShape
from harness.spec.table import NOTHING_FILLED, TableSources


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One combination of settings, with the reason when it cannot run."""

    experiment: str
    title: str
    settings: TrialSettings  # with the values that the planner chose, where it chose some
    deadline_seconds: float  # from the end of start-up; 0, for each limit: not set
    unsupported_reason: str | None = None
    # No part of the id:
    start_seconds: float = 0.0
    hang_seconds: float = 0.0  # without progress
    profile: bool = False  # whether one of its steps is traced
    table: TableSources = NOTHING_FILLED  # which of its settings came from baselines/settings.yaml
    plan: Forecast | None = None  # of the planner, where it chose some of the settings

    @property
    def id(self) -> str:
        """See `id_of`; the key of `--resume`."""
        return id_of(self.settings)


def is_named(trial_id: str, name: str) -> bool:
    """Whether a name that was typed means this trial: its id, the beginning of it, or a pattern with `*`."""
    return bool(name) and (trial_id.startswith(name) or fnmatchcase(trial_id, name))


# What the planner chooses since there were records: whether it was open is in no digest.
_PLANNED_LATER = {"head_groups", "checkpoint.host_layers", "gradient_offload"}


def id_of(settings: TrialSettings) -> str:
    """Readable and unique: task, method, length, CP size, and a digest of every setting that differs from its default.

    So a setting that is added later changes no id. What the planner chose is left out: a trial stays the same where the
    plan learns from another's peak. So is the model's note: rewording it makes no other trial.
    """
    values = _off_default(settings)
    planned = settings.planned.split()
    for key in ("planned", *planned):
        values.pop(key, None)
    if planned:
        values["not planned"] = sorted(set(PLANNABLE) - set(planned) - _PLANNED_LATER)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return f"{settings.task}-{settings.method}-s{settings.seq_len}-cp{settings.cp_size}-{digest}"


def _off_default(settings: TrialSettings | Checkpoint | Lora | ModelShape | Steps, prefix: str = "") -> dict[str, Any]:
    """By dotted name, the values that differ from their defaults, and those that have none."""
    found: dict[str, Any] = {}
    for each in fields(settings):
        value, default = getattr(settings, each.name), each.default
        if isinstance(value, Checkpoint | Lora | ModelShape | Steps):
            found |= _off_default(value, f"{prefix}{each.name}.")
        elif each.compare and value != default:
            found[prefix + each.name] = value
    return found
