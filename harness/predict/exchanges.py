"""How each method moves tensors between ranks, as the prediction simulates it."""

from __future__ import annotations

from engine.attention.planning.comm_volume import narrowed
from engine.attention.planning.cost_model import HardwareModel, asks_for_link, chosen_schedule
from engine.attention.planning.workload import trial_ring, trial_workload
from engine.method import schedule_of
from engine.settings import TrialSettings
from harness.metrics.hardware import Speeds
from harness.predict.attention import within_a_node
from harness.predict.problem import AttentionProblem, Exchange
from harness.spec.methods import all_methods, is_native, method_named


def exchange_of(settings: TrialSettings, problem: AttentionProblem, speeds: Speeds) -> Exchange:
    """Schedule, backward side and gradient width of a trial, as its method states them.

    Raises ValueError for a method that is not modelled.
    """
    method = method_named(settings.method)
    if not is_native(method):
        known = ", ".join(name for name, each in all_methods().items() if is_native(each))
        raise ValueError(f"method {settings.method} is not predicted; choose one of {known}")
    wire = settings.grad_comm_dtype
    if wire == "auto":
        wire = method.grad_comm_dtype  # type: ignore[attr-defined]  # of every native method
    narrow = narrowed(wire).across if problem.nodes > 1 else narrowed(wire).first_ring  # at the slowest links
    gradient_bytes = problem.input_bytes if narrow else max(4, problem.input_bytes)
    if settings.method == "burst":
        return _burst(settings, problem, speeds, gradient_bytes)
    if getattr(method, "tensor_parallel", False):
        return Exchange(
            schedule="tensor_parallel", backward="key_value", gradient_bytes=gradient_bytes,
            tuned_links=settings.settings != "as_published",
        )  # fmt: skip
    # Ulysses states no schedule: the plan's check of heads is not its own, which lets it repeat K and V.
    schedule = "ulysses" if settings.method == "ulysses" else schedule_of(method, settings)
    return Exchange(
        schedule=schedule if problem.nodes > 1 else within_a_node(schedule),
        backward="key_value",
        gradient_bytes=gradient_bytes,
        tuned_links=settings.settings != "as_published",
    )


def _burst(settings: TrialSettings, problem: AttentionProblem, speeds: Speeds, gradient_bytes: int) -> Exchange:
    """The exchange that the ranks take, by the engine's own choice, which is given one speed: that between nodes."""
    measured = asks_for_link(settings.schedule, settings.backward, settings.exchange) and not settings.deterministic
    hardware = HardwareModel(across_gib=speeds.across_gib) if measured else HardwareModel()
    schedule, chunks, _ = chosen_schedule(
        trial_workload(settings, problem.layout, problem.node_size), problem.layout.name, hardware,
        schedule=settings.schedule, backward=settings.backward, exchange=settings.exchange,
    )  # fmt: skip
    side = settings.backward
    if side == "auto":
        ring = trial_ring(settings, schedule, problem.layout, problem.node_size)
        side = "query" if ring.cheaper_backward(settings, hardware) == "query" else "key_value"
    return Exchange(
        schedule=schedule if problem.nodes > 1 else within_a_node(schedule),
        backward=side,
        gradient_bytes=gradient_bytes,
        head_chunks=chunks,
    )
