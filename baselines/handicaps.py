"""What set the compared systems apart in the paper's own runs, beside their methods: `handicaps.yaml`, read strictly.

Adapters apply those that have a value where a trial has `settings: as_published`; all others are words for a reader.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cluster.files import reader

if TYPE_CHECKING:
    from engine.settings import TrialSettings
    from engine.shape import ModelShape

FILE = Path(__file__).parent / "handicaps.yaml"
# Variables of NCCL that a script of the artifact sets: as published, a method has those of its own script alone.
NCCL_VARIABLES = ("NCCL_IB_QPS_PER_CONNECTION", "NCCL_MIN_NCHANNELS", "NCCL_NCHANNELS_PER_NET_PEER")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChange:
    """What a system's script has of a model, where it differs from experiments/models."""

    name: str
    ffn: int | None = None
    vocab: int | None = None
    gated: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Handicap:
    """One difference, whom it slows down, where it is written, and what `as_published` sets."""

    what: str
    against: Literal["this", "others"]
    source: str
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)  # of the system's command line
    model: tuple[ModelChange, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)  # read by the adapter

    @property
    def applied(self) -> bool:
        """Whether as_published sets something; an empty `environment` sets nothing, and says so in words."""
        return bool(self.environment or self.options or self.model or self.values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Handicaps:
    """The file: one list per method."""

    megatron_lm_upstream: tuple[Handicap, ...] = ()
    megatron_deepspeed_upstream: tuple[Handicap, ...] = ()
    internevo_upstream: tuple[Handicap, ...] = ()
    burst_engine_upstream: tuple[Handicap, ...] = ()


@functools.cache
def load_handicaps(path: Path = FILE) -> Handicaps:
    """Raises UsageError with file and line for anything but such a file."""
    return reader.load(Handicaps, path, "file of handicaps")


def handicaps(method: str) -> tuple[Handicap, ...]:
    """Those of a method; none for one that the paper's runs do not have."""
    found: tuple[Handicap, ...] = getattr(load_handicaps(), method, ())
    return found


def published(settings: TrialSettings) -> bool:
    """Whether a trial is to be run as the paper's was."""
    return getattr(settings, "settings", "equal") == "as_published"


def applied_values(settings: TrialSettings) -> dict[str, str]:
    """The values for a trial's adapter; none unless it is run as published."""
    if not published(settings):
        return {}
    return {name: value for one in handicaps(settings.method) for name, value in one.values.items()}


def applied_options(settings: TrialSettings) -> dict[str, str]:
    """Options of the command line, likewise."""
    if not published(settings):
        return {}
    return {name: value for one in handicaps(settings.method) for name, value in one.options.items()}


def applied_model(settings: TrialSettings) -> ModelShape:
    """The shape that is trained: the trial's own, or as the artifact's script has it."""
    shape = settings.model
    if not published(settings):
        return shape
    for one in handicaps(settings.method):
        for change in one.model:
            if change.name == shape.name:
                shape = replace(
                    shape,
                    ffn=change.ffn or shape.ffn,
                    vocab=change.vocab or shape.vocab,
                    gated=shape.gated if change.gated is None else change.gated,
                )
    return shape


def with_own_nccl(settings: TrialSettings, given: Mapping[str, str]) -> dict[str, str]:
    """A node's variables for one of the paper's copies: run as published, it has the NCCL variables of its own script,
    and none of those that all methods get otherwise."""
    own = handicaps(settings.method)
    if not published(settings) or not own:
        return dict(given)
    others = {name: value for name, value in given.items() if name not in NCCL_VARIABLES}
    return others | {name: value for one in own for name, value in one.environment.items()}
