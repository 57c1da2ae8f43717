"""Configuration of one training run. Pure data; `engine.settings` has the settings shared with a timed trial.

The learning rate of a step is a pure function of it, so that a resumed run needs no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.checkpoint.counts import packed_shares
from engine.data.sequences import PackedCounts
from engine.hf import adapter_unsupported_reason
from engine.measurement import Forecast
from engine.settings import AdamWSettings, TrialSettings
from engine.training.trackers import TrackerName


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The learning rate rises linearly for `warmup` steps to the setting's `learning_rate`, then falls along a cosine
    to `minimum` times that at the last step (arXiv:1608.03983, without restarts)."""

    warmup: int = 0
    minimum: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise ValueError(f"lr_schedule.warmup is {self.warmup}; give 0 steps or more")
        if not 0 <= self.minimum <= 1:
            raise ValueError(f"lr_schedule.minimum is {self.minimum:g}; give a part of learning_rate, from 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The loss on held-out text, before the first step, after every `every` steps and after the last one."""

    every: int = 0  # 0: never
    sequences: int = 8  # the same ones each time

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"evaluate.every is {self.every}; give a number of steps, or 0 for never")
        if self.sequences < 1:
            raise ValueError(f"evaluate.sequences is {self.sequences}; give at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """Checkpoints: after every `every` steps, after the last one, and when the run is asked to stop."""

    every: int = 0  # 0: only at the end
    keep: int = 2  # newest checkpoints; older ones are deleted
    grace_seconds: float = 300.0  # a run asked to stop may take this long to finish its step and save

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"save.every is {self.every}; give a number of steps, or 0 for only at the end")
        if self.keep < 1:
            raise ValueError(f"save.keep is {self.keep}; give at least 1, from which the run can resume")
        if self.grace_seconds <= 0:
            raise ValueError(f"save.grace_seconds is {self.grace_seconds:g}; give a number above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsChoice:
    """Where metrics go besides metrics.jsonl, which is always written."""

    tracker: TrackerName = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """One training run. `settings.steps` is unused: a run has `steps` optimizer steps and times all of them."""

    settings: TrialSettings
    steps: int
    optimizer: AdamWSettings = field(default_factory=AdamWSettings)
    lr_schedule: Schedule = field(default_factory=Schedule)
    evaluate: Evaluation = field(default_factory=Evaluation)
    save: Saving = field(default_factory=Saving)
    metrics: MetricsChoice = field(default_factory=MetricsChoice)
    # Directory of a model in Hugging Face's layout to start from, or with `lora` to add adapters to, also when a run is
    # resumed. Empty: seeded random values.
    init_from: str = ""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; give at least 1")
        if self.lr_schedule.warmup > self.steps:
            raise ValueError(f"lr_schedule.warmup is {self.lr_schedule.warmup}, and steps is {self.steps}; give fewer")
        if self.settings.lora is not None:
            if not self.init_from:
                raise ValueError(
                    "lora trains adapters of a given model, found no init_from; name the model's folder there"
                )
            if reason := adapter_unsupported_reason(self.settings.model, self.settings.lora):
                raise ValueError(reason)

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one optimizer step over all replicas and micro-batches."""
        return self.settings.batch_size * self.settings.gradient_accumulation * self.settings.dp_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all replicas and micro-batches."""
        return self.sequences_per_step * self.settings.seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The harness's order to the ranks: the run, and figures that only the harness computes."""

    config: TrainingConfig
    method: str  # import path of the module that defines it
    resume: bool  # from the newest checkpoint
    model_flops_per_step: float  # by the one formula (harness/metrics/flops.py), over all ranks
    attention_flops_per_step: float = 0.0  # of these, those of attention; known where rows are packed
    peak_tflops: float | None  # dense bf16 of one GPU; None where MFU means nothing
    plan: Forecast | None = None  # of `checkpoint: auto`

    def packed_flops(self, counts: PackedCounts) -> float:
        """Model FLOPs of a step on packed rows: `model_flops_per_step` are those of full rows of one document each."""
        of_tokens, of_pairs = packed_shares(self.config.settings, counts.tokens, counts.pairs)
        others = self.model_flops_per_step - self.attention_flops_per_step
        return others * of_tokens + self.attention_flops_per_step * of_pairs

    @property
    def facts(self) -> dict[str, object]:
        """Settings that steps depend on beyond data: a run cannot resume from a checkpoint made with other values."""
        settings = self.config.settings
        shape = {name: getattr(settings.model, name) for name in settings.model.__dataclass_fields__}
        return {
            **{f"model.{name}": value for name, value in shape.items() if name not in ("name", "note")},
            **{name: getattr(settings, name) for name in ("dtype", "z_loss", "seq_len", "seed")},
            **{name: getattr(settings, name) for name in ("linear_dtype", "optimizer_states")},
            "lora": settings.lora and str(settings.lora),
            "mask": settings.masks[0],
            **({name: getattr(settings, name) for name in ("packing", "longer_documents")} if settings.packs else {}),
            "sequences per step (batch_size x gradient_accumulation x replicas)": self.config.sequences_per_step,
        }


def learning_rate(step: int, steps: int, peak: float, schedule: Schedule) -> float:
    """Learning rate of `step`, counted from 0, of `steps`.

    Warm-up step w of W has peak x (w + 1) / W, so no step is lost to a rate of 0; the last step of all has
    peak x minimum.
    """
    assert 0 <= step < steps, (step, steps)
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    after = steps - schedule.warmup
    passed = (step + 1 - schedule.warmup) / after
    lowest = peak * schedule.minimum
    return lowest + (peak - lowest) * (1 + math.cos(math.pi * passed)) / 2
