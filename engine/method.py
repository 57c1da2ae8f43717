"""A method: one way to run a trial. The engine's own is `burst`; baselines provide the others through this protocol.

A method says whether it can run a trial (or one sentence why not), with which command, and reads the measurement. A
native method changes nothing but the parallel attention inside the engine's model and trainer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from engine.attention.problem import RUNS_OF_TOKENS, HeadsAndRanks, schedule_unsupported_reason, shared_node_size
from engine.combinations import combination_unsupported_reason
from engine.lora import adapters_unsupported_reason
from engine.measurement import Measurement, read_measurement

if TYPE_CHECKING:  # methods are listed and planned without importing torch
    from engine.attention.algorithms.saved import AttentionFn
    from engine.attention.context import ContextParallel
    from engine.attention.geometry.layout import Layout
    from engine.attention.resolve import Choices
    from engine.linear.shard import LinearShard, Recurrence
    from engine.settings import TrialSettings


class Method(Protocol):
    """The interface of every compared system to the harness, `burst` included."""

    name: str  # as written in experiment files
    system: str  # the system it stands for, as printed in tables
    source: str  # paper or repository of the idea

    def refuse(self, settings: TrialSettings) -> str | None:
        """One sentence why this trial cannot run with this method, or None. Pure: looks at the settings alone."""
        ...

    def command(self, trial_dir: Path) -> list[str]:
        """Program and arguments of one rank; `trial_dir` holds trial.json."""
        ...

    def read(self, trial_dir: Path) -> Measurement:
        """The measurement of the finished trial. Raises FileNotFoundError when there is none."""
        ...


class NativeMethod(Method, Protocol):
    """A method that runs inside the engine's worker and supplies only the attention, or also divides the model's
    matrices (`engine.parallelize.TensorParallelMethod`)."""

    def layout(self, settings: TrialSettings) -> str | Layout:
        """Layout the sequence is sharded in: contiguous, zigzag or striped, or a `Layout` with parameters."""
        ...

    def attention(self, cp: ContextParallel, settings: TrialSettings, mask: str | None = None) -> AttentionFn:
        """This method's attention among the ranks of `cp`, whose layout is the one that `layout` returned, in layers
        with this one of `settings.masks`, the first by default."""
        ...


class RecurrenceMethod(NativeMethod, Protocol):
    """A native method that runs the recurrence of a linear layer alone (task linear)."""

    def recurrence(self, shard: LinearShard) -> Recurrence:
        """The recurrence of this rank's consecutive tokens."""
        ...


class PlannedMethod(NativeMethod, Protocol):
    """A native method whose attention the engine plans: its choices are known without running it."""

    def choices(self, settings: TrialSettings) -> Choices:
        """What the method fixes of its attention, and what it leaves to `engine.attention.resolve`."""
        ...

    def kv_heads(self, settings: TrialSettings) -> int:
        """KV heads that the choices are made for: those of the model, or more where the method repeats them first."""
        ...


def unavailable_reason(method: Method, device: str, kernel: str = "auto") -> str | None:
    """Why a foreign system cannot run on this machine, whose ranks use `device`: it is not installed, needs another
    device, or was installed without the trial's `kernel`. None where it can, and for native methods, which the engine
    runs."""
    unavailable = getattr(method, "unavailable", None)
    reason: str | None = None if unavailable is None else unavailable(device, kernel)
    return reason


def method_unsupported_reason(method: Method, settings: TrialSettings) -> str | None:
    """Why a method cannot run a trial, or None: a model that only the engine trains, a setting that only other systems
    have, or what it answers itself."""
    if hasattr(method, "layout") and (words := settings.checkpoint.upstream) != "default":
        return f"{method.name} has no choice of checkpoint.upstream, found {words!r}; leave it out"
    if settings.task == "attention" and settings.model.kv_latent:
        return (
            f"task attention has queries, keys and values alone, and model {settings.model.name} has a latent of them; "
            "choose task train"
        )
    if settings.task == "linear" and hasattr(method, "layout") and not hasattr(method, "recurrence"):
        return f"task linear runs no attention, so {method.name} would measure the same as burst; set method to burst"
    feature = settings.model.feature_beyond_llama
    # Methods of the engine train every model; of the others, those that train more than Llama say themselves what.
    answers = hasattr(method, "layout") or getattr(method, "beyond_llama", None)
    if settings.task == "train" and feature and not answers:
        return (
            f"{method.name} trains Llama's decoder, and model {settings.model.name} has {feature} "
            f"{getattr(settings.model, feature)}; choose a method that runs in the engine, such as burst"
        )
    common = combination_unsupported_reason(settings) or lora_unsupported_reason(method, settings)
    return common or method.refuse(settings)


def lora_unsupported_reason(method: Method, settings: TrialSettings) -> str | None:
    """Why a trial cannot train adapters, or None."""
    lora = settings.lora
    if lora is None:
        return None
    if settings.task != "train":
        return f"lora is a setting of task train, found {settings.task}; leave it out"
    if not hasattr(method, "layout"):
        return f"{method.name} is a program that is given no adapters; leave lora out, or choose a method such as burst"
    if settings.tp_size > 1:
        return f"lora has no tensor parallelism, found tp_size {settings.tp_size}; set it to 1"
    if settings.loss_kernel != "own":
        return f"lora was tried with no other loss_kernel than own, found {settings.loss_kernel}; set it to own"
    return adapters_unsupported_reason(settings.model, lora)


def in_worker(method: Method) -> NativeMethod:
    """The method as the engine's worker runs it: itself, or what a compared system's adapter gives for itself."""
    adapted = getattr(method, "in_worker", None)
    return cast(NativeMethod, method if adapted is None else adapted())


class EngineCommand:
    """What all native methods share: the engine's own worker runs them."""

    grad_comm_dtype = "fp32"  # what `grad_comm_dtype: auto` stands for: the dtype that the original sends

    def command(self, trial_dir: Path) -> list[str]:
        return [sys.executable, "-m", "engine.worker", str(trial_dir)]

    def read(self, trial_dir: Path) -> Measurement:
        return read_measurement(trial_dir)

    def kv_heads(self, settings: TrialSettings) -> int:
        return settings.model.kv_heads


def planned_method(method: Method) -> PlannedMethod | None:
    """The method, where the engine plans its attention; None for compared systems, which divide heads themselves."""
    return cast(PlannedMethod, method) if hasattr(method, "choices") else None


def schedule_unsupported_reason_on(method: Method, settings: TrialSettings, nodes: int) -> str | None:
    """Why the ranks of a planned method, spread evenly over `nodes`, would refuse its choices or their schedule; None
    when they would not, and for other methods, which check their settings themselves."""
    planned = planned_method(method)
    if planned is None or settings.task in ("lm_head", "linear"):
        return None
    from engine.attention.resolve import check_choices

    choices = planned.choices(settings)
    try:
        check_choices(choices)
    except ValueError as error:
        return str(error)
    schedule = choices.schedule
    if schedule not in RUNS_OF_TOKENS:
        return None
    chosen = planned.layout(settings)
    name = chosen if isinstance(chosen, str) else chosen.name
    ranks, cp_size = settings.world_size, settings.cp_size
    heads, kv_heads = settings.model.heads, planned.kv_heads(settings)
    hosts = [str(rank * nodes // ranks) for rank in range(ranks)]
    # Context-parallel ranks are consecutive, and each group of them finds its nodes by itself.
    node_sizes = {shared_node_size(hosts[first : first + cp_size]) for first in range(0, ranks, cp_size)}
    shares = (
        HeadsAndRanks(cp_size=cp_size, node_size=node_size, heads=heads, kv_heads=kv_heads)
        for node_size in sorted(node_sizes)
    )
    return next((reason for share in shares if (reason := schedule_unsupported_reason(schedule, share, name))), None)
