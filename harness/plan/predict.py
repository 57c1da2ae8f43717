"""Time and memory of a trial on given GPUs, predicted from its settings without running it.

Time is that of the simulated schedule (`harness.predict.step`), the same wherever a trial is predicted. Memory is that
of `engine.checkpoint.planning.memory`, the model that `checkpoint: auto` plans with.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.planning.memory import RankMemory, memory_of
from engine.settings import TrialSettings
from harness.metrics.hardware import Hardware
from harness.metrics.throughput import GIB
from harness.plan.times import time_or_reason
from harness.spec.methods import is_native, method_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one trial; None where nothing is predicted."""

    seconds: float | None  # of a step, or of a call
    gpu_gib: float | None  # allocated on the fullest rank, approximately
    reserved_gib: float | None  # by its allocator
    host_gib: float | None  # of one rank's process, approximately


def predict(settings: TrialSettings, hardware: Hardware, *, node_ranks: int | None = None) -> Prediction:
    """Time and memory of a trial on GPUs of this kind, of which a node gives it `node_ranks`."""
    memory = engine_memory(settings)
    time, _ = time_or_reason(settings, hardware, node_ranks=node_ranks)
    return Prediction(
        seconds=time.seconds if time else None,
        gpu_gib=memory.allocated / GIB if memory else None,
        reserved_gib=memory.reserved / GIB if memory else None,
        host_gib=memory.host / GIB if memory else None,
    )


def engine_memory(settings: TrialSettings) -> RankMemory | None:
    """Of one rank of a training trial that the engine runs without dividing its matrices; other systems and tasks, and
    tensor-parallel ranks, hold what they hold."""
    native = is_native(method_named(settings.method))
    return memory_of(settings) if settings.task == "train" and native and settings.tp_size == 1 else None
