"""The common part of the ring baselines: a fixed layout, and K and V sent around the ring in forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.attention.geometry.layout import split_unsupported_reason
from engine.attention.problem import ALL_GATHER
from engine.attention.resolve import Choices, trial_choices
from engine.method import EngineCommand

if TYPE_CHECKING:
    from engine.attention.algorithms.saved import AttentionFn
    from engine.attention.context import ContextParallel
    from engine.settings import TrialSettings


def fixed_settings_unsupported_reason(settings: TrialSettings, fixed: dict[str, str | None]) -> str | None:
    """Why the method cannot honour a setting it fixes, or has no use for (None), or None. `auto` always fits."""
    for name, value in fixed.items():
        found = getattr(settings, name)
        if value is None and found != "auto":
            return f"{settings.method} has no choice of {name}, found {found}; set {name} to auto"
        if found not in ("auto", value):
            return f"{settings.method} always uses {name} {value}, found {found}; set {name} to auto or {value}"
    return None


class KeyValueRing(EngineCommand):
    """A ring that sends K and V in forward, and K, V and their gradients in backward."""

    name: str
    system: str
    source: str
    sharding: str  # layout
    schedules: tuple[str, ...] = ("ring",)  # that the system has; `auto` stands for the first
    forward_streams: int = 1  # of a GPU, that the steps of a forward use in turn

    def refuse(self, settings: TrialSettings) -> str | None:
        if settings.tp_size > 1:
            return f"{self.name} runs without tensor parallelism, found tp_size {settings.tp_size}; set tp_size to 1"
        fixed: dict[str, str | None] = {
            "layout": self.sharding,
            "schedule": self.schedule_of(settings),
            "backward": "key_value",
            "exchange": None if self.schedule_of(settings) == ALL_GATHER else "relay",
        }
        return fixed_settings_unsupported_reason(settings, fixed) or split_unsupported_reason(
            self.sharding, settings.row_tokens, settings.cp_size
        )

    def layout(self, settings: TrialSettings) -> str:
        return self.sharding

    def schedule_of(self, settings: TrialSettings) -> str:
        """The schedule that runs: the setting where the system has it, else the system's first."""
        return settings.schedule if settings.schedule in self.schedules else self.schedules[0]

    def choices(self, settings: TrialSettings) -> Choices:
        schedule = self.schedule_of(settings)
        # An all-to-all exchanges all heads before attention, and all after it.
        return trial_choices(settings, self.grad_comm_dtype)._replace(
            schedule=schedule,
            backward="key_value",
            exchange="auto" if schedule == ALL_GATHER else "relay",
            num_head_chunks=1,
            forward_streams=self.forward_streams,
        )

    def attention(self, cp: ContextParallel, settings: TrialSettings, mask: str | None = None) -> AttentionFn:
        from engine.attention.bound import BoundAttention

        return BoundAttention(cp, settings, self.choices(settings), mask)
