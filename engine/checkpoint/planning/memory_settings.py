"""What the planner chooses of a trial's settings, and which of it a user has left open."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from engine.settings import Checkpoint, TrialSettings

# Dotted names of the settings that the planner may choose.
OF_CHECKPOINT = ("every", "tail", "offload", "replay", "whole_layers", "mlp", "host_layers")
BESIDE_CHECKPOINT = (
    "mlp_tiles", "projection_tiles", "optimizer_offload", "gradient_offload", "head_tiles", "head_groups",
)  # fmt: skip
PLANNABLE = (*(f"checkpoint.{name}" for name in OF_CHECKPOINT), *BESIDE_CHECKPOINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """One way to spend the memory."""

    checkpoint: Checkpoint
    mlp_tiles: int = 1
    projection_tiles: int = 1
    optimizer_offload: bool | float = False
    gradient_offload: bool = False
    head_tiles: int = 0
    head_groups: int = 1


def memory_settings_of(settings: TrialSettings) -> MemorySettings:
    """What these settings choose."""
    return MemorySettings(
        checkpoint=settings.checkpoint, **{name: getattr(settings, name) for name in BESIDE_CHECKPOINT}
    )


def with_memory_settings(settings: TrialSettings, choice: MemorySettings) -> TrialSettings:
    """The settings with another choice."""
    beside: dict[str, Any] = {name: getattr(choice, name) for name in BESIDE_CHECKPOINT}
    return replace(settings, checkpoint=replace(choice.checkpoint, plan=settings.checkpoint.plan), **beside)


def left_open(settings: TrialSettings, given: Collection[str]) -> TrialSettings:
    """The settings with `planned` naming all that the planner may choose but the `given` dotted names, which a user has
    set. Unchanged unless `checkpoint.plan` is auto."""
    if settings.checkpoint.plan != "auto":
        return settings
    return replace(settings, planned=" ".join(name for name in PLANNABLE if name not in given))


def open_names(settings: TrialSettings) -> frozenset[str]:
    """The dotted names in `planned`. Raises ValueError for one that the planner does not choose."""
    names = frozenset(settings.planned.split())
    if unknown := sorted(names - set(PLANNABLE)):
        raise ValueError(f"planned names {unknown[0]}, which the planner does not choose; expected {PLANNABLE}")
    return names
