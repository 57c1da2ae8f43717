"""How each method moves tensors between ranks, as the prediction simulates it."""

from __future__ import annotations

from engine.attention.geometry.ring import Ring
from engine.attention.planning.comm_plan import traffic_left
from engine.attention.planning.comm_volume import RingVolume, Shards, Widths, cheaper_backward
from engine.attention.planning.cost_model import (
    ULYSSES_SCHEDULES,
    HardwareModel,
    Workload,
    choose_num_head_chunks,
    choose_schedule,
    schedule_unsupported_reason,
)
from engine.settings import TrialSettings
from harness.predict.attention import AttentionProblem, Exchange, Side
from harness.predict.speeds import Speeds

# Schedule and backward side of the compared methods. Their gradients travel in the inputs' dtype.
_COMPARED: dict[str, tuple[str, Side]] = {
    "ring": ("ring", "key_value"),
    "megatron_cp": ("ring", "key_value"),
    "torch_cp": ("ring", "key_value"),
    "ulysses": ("ulysses", "key_value"),
    "loongtrain_double_ring": ("double_ring", "key_value"),
    "loongtrain_usp": ("usp", "key_value"),
}
_SENDS_FP32 = ("ring", "torch_cp")
PREDICTED = ("burst", *_COMPARED)


def exchange_of(settings: TrialSettings, problem: AttentionProblem, speeds: Speeds) -> Exchange:
    """Schedule, backward side and gradient width of a trial. Raises ValueError for a method that is not modelled."""
    published = getattr(settings, "settings", "equal") == "as_published"
    if settings.method == "burst":
        return _burst(settings, problem, speeds)
    if settings.method not in _COMPARED:
        raise ValueError(f"method {settings.method} is not predicted; choose one of {', '.join(PREDICTED)}")
    schedule, side = _COMPARED[settings.method]
    schedule = settings.schedule if settings.schedule != "auto" else schedule
    if problem.nodes == 1 and schedule == "usp":
        schedule = "ulysses"
    return Exchange(
        schedule=schedule,
        backward=side,
        gradient_bytes=4 if settings.method in _SENDS_FP32 else problem.input_bytes,
        tuned_links=not published,
    )


def _burst(settings: TrialSettings, problem: AttentionProblem, speeds: Speeds) -> Exchange:
    """What `auto` takes, by the engine's own cost model at these speeds."""
    narrow = settings.grad_comm_dtype == "input" or (settings.grad_comm_dtype == "input_across" and problem.nodes > 1)
    gradient_bytes = problem.input_bytes if narrow else max(4, problem.input_bytes)
    hardware = HardwareModel(
        forward_tflops=speeds.attention_forward_tflops,
        backward_tflops=speeds.attention_backward_tflops,
        inside_gib=speeds.inside_gib,
        across_gib=speeds.across_gib,
        ring_step_seconds=speeds.ring_step_seconds,
        memory_gib=speeds.memory_gib,
    )
    workload = Workload(
        cp_size=problem.cp_size,
        node_size=problem.node_size,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        query_bytes=problem.batch * problem.seq_len // problem.cp_size * problem.heads * problem.head_dim
        * problem.input_bytes,
        gradient_factor=gradient_bytes / problem.input_bytes,
        forward_flops=problem.pair_flops * problem.mask.area(problem.seq_len) / problem.cp_size,
        rows=problem.batch * problem.seq_len // problem.cp_size,
        left=traffic_left(problem.mask, problem.layout, problem.cp_size, problem.node_size, problem.seq_len),
    )  # fmt: skip
    schedule: str = settings.schedule
    if schedule == "auto":
        schedule = choose_schedule(workload, problem.layout.name, hardware).best
    if problem.nodes == 1:  # nothing lies between nodes
        schedule = {"double_ring": "ring", "usp": "ulysses", "usp_transposed": "ring"}.get(schedule, schedule)
    if reason := schedule_unsupported_reason(schedule, workload, problem.layout.name):
        raise ValueError(reason)
    chunks = choose_num_head_chunks(schedule, workload, hardware) if schedule in ULYSSES_SCHEDULES else 1
    side: Side = _side(settings, problem, schedule, gradient_bytes, hardware)
    return Exchange(schedule=schedule, backward=side, gradient_bytes=gradient_bytes, head_chunks=chunks)


def _side(
    settings: TrialSettings, problem: AttentionProblem, schedule: str, gradient_bytes: int, hardware: HardwareModel
) -> Side:
    if settings.backward != "auto":
        return settings.backward
    if problem.cp_size == 1 or schedule in ULYSSES_SCHEDULES:
        return "query"
    widths = Widths(unreduced=gradient_bytes, summed=gradient_bytes)
    shards = Shards(
        batch=problem.batch, tokens=problem.seq_len // problem.cp_size, heads=problem.heads,
        kv_heads=problem.kv_heads, head_dim=problem.head_dim, input_bytes=problem.input_bytes, intra_node=widths,
        inter_node=widths,
    )  # fmt: skip
    size = problem.cp_size if schedule == "ring" else problem.node_size
    volume = RingVolume(
        ring=Ring(cp_size=problem.cp_size, node_size=size), node_size=problem.node_size, exchange="relay"
    )
    cheaper = cheaper_backward(problem.mask, problem.layout, volume, problem.seq_len, shards, hardware)
    return "query" if cheaper == "query" else "key_value"
