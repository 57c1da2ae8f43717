"""What a native method's ranks resolve to, and how the prediction simulates it."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from engine.attention.problem import Problem
from engine.attention.resolve import HardwareModel, Resolved, asks_for_link, resolve
from engine.method import PlannedMethod
from engine.settings import TrialSettings
from harness.metrics.hardware import HardwareSpeeds
from harness.predict.problem import Exchange, Side
from harness.spec.methods import all_methods, is_native, method_named


def resolved_of(settings: TrialSettings, problem: Problem, speeds: HardwareSpeeds) -> Resolved:
    """What the engine's ranks choose, given the speed of the link between nodes where they would measure it.

    Raises ValueError for a method that is not modelled, and for what cannot run.
    """
    method = method_named(settings.method)
    if not is_native(method):
        known = ", ".join(name for name, each in all_methods().items() if is_native(each))
        raise ValueError(f"method {settings.method} is not predicted; choose one of {known}")
    choices = cast(PlannedMethod, method).choices(settings)
    if settings.method == "ulysses":  # repeats the K and V heads that are fewer than ranks
        problem = replace(problem, kv_heads=max(problem.kv_heads, problem.cp_size))
    measured = asks_for_link(problem, choices) and not choices.deterministic
    hardware = HardwareModel(across_gib=speeds.across_gib) if measured else HardwareModel()
    return resolve(problem, hardware, choices)


def exchange_of(settings: TrialSettings, problem: Problem, speeds: HardwareSpeeds) -> Exchange:
    """Schedule, backward side, head chunks and gradient width of a trial. Raises ValueError as `resolved_of`."""
    found = resolved_of(settings, problem, speeds)
    divides_matrices = hasattr(method_named(settings.method), "tensor_parallel")
    return Exchange(
        schedule="tensor_parallel" if divides_matrices else found.schedule,
        backward=cast(Side, found.backward),
        gradient_bytes=found.summed_bytes,
        head_chunks=found.num_head_chunks,
        reason=found.reason,
        tuned_links=settings.method == "burst" or settings.settings != "as_published",
    )
