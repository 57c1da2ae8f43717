"""How each method moves tensors between ranks, as the prediction simulates it."""

from __future__ import annotations

from engine.attention.geometry.ring import Ring
from engine.attention.planning.comm_volume import RingVolume, cheaper_backward, narrowed
from engine.attention.planning.cost_model import (
    ULYSSES_SCHEDULES,
    HardwareModel,
    Workload,
    choose_num_head_chunks,
    choose_schedule,
    model_chooses,
    ring_by_name,
    schedule_unsupported_reason,
)
from engine.attention.planning.workload import workload_of
from engine.method import schedule_of
from engine.settings import TrialSettings
from harness.metrics.hardware import Speeds
from harness.predict.attention import within_a_node
from harness.predict.problem import AttentionProblem, Exchange, Side
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
    """The exchange that `auto` takes by the engine's cost model, which is given one speed: that between nodes."""
    hardware = HardwareModel(across_gib=speeds.across_gib)
    workload = workload_of_problem(problem, gradient_bytes)
    schedule: str = settings.schedule
    if model_chooses(schedule, settings.backward, settings.exchange):
        schedule = choose_schedule(workload, problem.layout.name, hardware).best
    elif schedule == "auto":
        schedule = ring_by_name(problem.nodes)
    if problem.nodes == 1:
        schedule = within_a_node(schedule)
    if reason := schedule_unsupported_reason(schedule, workload, problem.layout.name):
        raise ValueError(reason)
    chunks = choose_num_head_chunks(schedule, workload, hardware) if schedule in ULYSSES_SCHEDULES else 1
    side: Side = _side(settings, problem, schedule, gradient_bytes, hardware)
    return Exchange(schedule=schedule, backward=side, gradient_bytes=gradient_bytes, head_chunks=chunks)


def workload_of_problem(problem: AttentionProblem, gradient_bytes: int) -> Workload:
    """One rank's part of a problem for the engine's cost model; `gradient_bytes`: of an element that is sent."""
    return workload_of(
        problem.mask, problem.layout, cp_size=problem.cp_size, node_size=problem.node_size, seq_len=problem.seq_len,
        batch=problem.batch, heads=problem.heads, kv_heads=problem.kv_heads, head_dim=problem.head_dim,
        input_bytes=problem.input_bytes, gradient_bytes=gradient_bytes,
    )  # fmt: skip


def _side(
    settings: TrialSettings, problem: AttentionProblem, schedule: str, gradient_bytes: int, hardware: HardwareModel
) -> Side:
    if settings.backward != "auto":
        return settings.backward
    if problem.cp_size == 1 or schedule in ULYSSES_SCHEDULES:
        return "query"
    shards = problem.shards(gradient_bytes, tokens=problem.seq_len // problem.cp_size)
    size = problem.cp_size if schedule == "ring" else problem.node_size
    volume = RingVolume(
        ring=Ring(cp_size=problem.cp_size, node_size=size), node_size=problem.node_size, exchange="relay"
    )
    cheaper = cheaper_backward(problem.mask, problem.layout, volume, problem.seq_len, shards, hardware)
    return "query" if cheaper == "query" else "key_value"
