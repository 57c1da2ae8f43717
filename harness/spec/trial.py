"""A trial: one point of a sweep, planned but not yet run. Pure data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from engine.forecast import Forecast
from engine.old_names import first_settings
from engine.settings import TrialSettings, to_json
from harness.spec.methods import all_methods
from harness.spec.table import NOTHING_FILLED, FromTable

# Settings that came after runs had been published, and what every run was until then: so these can still be resumed.
_LATER = {
    "checkpoint.replay": "hold", "checkpoint.whole_layers": 0, "checkpoint.mlp": 1.0, "projection_tiles": 1,
    "parameters": "auto", "cuda_graph": "auto", "head_tiles": 0, "gather_ahead": 1,
    "settings": "equal",
    "repeat_kv_heads": True, "overlap_projections": False,
    "checkpoint.plan": "hand", "memory": "", "planned": "",
}  # fmt: skip


_LATER_PLANNED = frozenset({"head_tiles", "gather_ahead"})  # that the planner chose nothing of in earlier runs


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
    share_ranks: bool = False  # whether the ranks of the trial before it may run it
    profile: bool = False  # whether one of its steps is traced
    table: FromTable = NOTHING_FILLED  # which of its settings came from baselines/settings.yaml
    plan: Forecast | None = None  # of the planner, where it chose some of the settings

    @property
    def id(self) -> str:
        """See `id_of`; the key of `--resume`."""
        return id_of(self.settings)


def id_of(settings: TrialSettings) -> str:
    """Readable and unique: task, method, length, CP size, and a digest of all settings.

    Settings and values go by the names they had first. The model's note is left out: rewording it makes no other trial.
    So is a later setting at the value that stands for what there was before it, and what the planner chose: a trial
    stays the same where the plan learns from another's peak.
    """
    values = first_settings(to_json(settings))
    del values["model"]["note"]
    if settings.grad_comm_dtype == "auto":  # what every run before there was `auto` sent
        sent = getattr(all_methods().get(settings.method), "grad_comm_dtype", "fp32")
        values["gradient_wire"] = "fp32" if sent == "fp32" else "auto"
    for key in settings.planned.split():
        *owner, name = key.split(".")
        (values[owner[0]] if owner else values).pop(name, None)
    if settings.planned:
        values["planned"] = " ".join(name for name in settings.planned.split() if name not in _LATER_PLANNED)
    for key, before in _LATER.items():
        *owner, name = key.split(".")
        holder = values[owner[0]] if owner else values
        if holder.get(name) == before:
            del holder[name]
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    return f"{settings.task}-{settings.method}-s{settings.seq_len}-cp{settings.cp_size}-{digest}"
