"""From the events of a Chrome trace to seconds by category that add up to the step. Pure.

Only an operation's name and the ranges around it decide its category. The rules use the parts of a name that a library
keeps across shapes, types and releases. Those of FlashAttention, cuDNN, PyTorch, FlexAttention, cuBLAS and NCCL were
seen on H200; those of Liger, CCE, memory-efficient attention and the kernels around cuDNN's backward were not.

Times of a trace are microseconds. On a GPU the events are kernels and copies; on a CPU they are the operators, each for
the time that none of those it called was running.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from engine.ops import LM_HEAD, OPTIMIZER, RECOMPUTE, STEP

Category = Literal[
    "attention_forward",
    "attention_backward",
    "attention_recomputed",
    "matmul",
    "recomputed",
    "lm_head",
    "optimizer",
    "other_compute",
    "merge",
    "communication",
    "copies",
    "idle",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)  # in order of precedence where several run at once

_COPIES = re.compile(r"Mem(cpy|set)\b")
_COMMUNICATION = re.compile(r"nccl|c10d::|gloo:")
_ATTENTION_BACKWARD = re.compile(
    r"flash_bwd|flash_bprop|flex_attention_backward|fmha_cutlassB"
    r"|cudnn::fusion::(compute_dot_do_o|convert_dq)"  # before and after cuDNN's kernel
    r"|scaled_dot_product_\w*_backward|_flash_attention_backward|_efficient_attention_backward"
)
_ATTENTION_FORWARD = re.compile(
    r"flash_fwd|flash_fprop|flex_attention|fmha_cutlassF|scaled_dot_product_|_flash_attention|_efficient_attention"
)
_MATMUL = re.compile(
    r"nvjet|gemm|cublas|xmma|cutlass_\d+_|splitKreduce|gemv|triton_tem_fused_\w*mm"
    r"|aten::(mm|bmm|addmm|addmm_|addbmm|baddbmm|addmv|mv|dot|_grouped_mm)$",
    re.IGNORECASE,
)
_LM_HEAD = re.compile(r"_loss_and_gradient_kernel|log_?softmax|nll_loss|cross_entropy|_cce_|_indexed_neg_dot", re.I)
# FSDP gathers with a multi-tensor copy, which is not the optimizer's.
_OPTIMIZER = re.compile(r"multi_tensor_apply_kernel(?!.*Copy)|fused_?adam", re.I)
_MERGE = re.compile(r"_(merge|add|row_dot|stand_in)_kernel$")


def category_of(name: str, ranges: Set[str] = frozenset()) -> Category:
    """The category of the operation `name` that was launched inside these `ranges`.

    A transfer is one wherever it was launched. Of recomputed operations only attention has a category of its own. An
    operation that no rule matches is other compute.
    """
    again = RECOMPUTE in ranges
    if _COPIES.match(name):
        return "copies"
    if _COMMUNICATION.match(name):
        return "communication"
    if _ATTENTION_BACKWARD.search(name):
        return "attention_backward"
    if _ATTENTION_FORWARD.search(name):
        return "attention_recomputed" if again else "attention_forward"
    if again:
        return "recomputed"
    if OPTIMIZER in ranges or _OPTIMIZER.search(name):
        return "optimizer"
    if _MATMUL.search(name):
        return "matmul"
    if LM_HEAD in ranges or _LM_HEAD.search(name):
        return "lm_head"
    return "merge" if _MERGE.match(name) else "other_compute"


class Event(TypedDict, total=False):
    """Of a trace, as JSON has it; times in microseconds. Of one that took time `ph` is X, and all but `args` exist."""

    name: str
    ph: str
    cat: str
    ts: float
    dur: float
    pid: object
    tid: object
    args: Mapping[str, object]


Thread = tuple[object, object]  # process and thread id of the host

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})
_POSTS = "c10d::"  # operators that begin a transfer
_OPERATORS = ("aten::", _POSTS)  # the others on a CPU contain these: autograd's nodes, functions in Python
_TRANSFER = "gloo:"  # marks a transfer for as long as it takes


@dataclass(frozen=True, slots=True)
class TimedOp:
    """An operation that ran from `start` to `end`, microseconds."""

    start: float
    end: float
    category: Category


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Seconds from the step's first event to its last, and by category; `on` is where the events ran."""

    on: str  # gpu or cpu
    span_seconds: float
    seconds: dict[Category, float]  # every category, in order of precedence; they add up to `span_seconds`


def breakdown_of(events: Sequence[Event]) -> Breakdown:
    """Breakdown of the events that began while range STEP was open, or of all events where it was never opened."""
    whole = [event for event in events if event.get("ph") == "X"]
    opened, closed = _window(whole)
    on_device = [event for event in whole if event.get("cat") in _ON_DEVICE]
    spans = _device_spans(on_device, whole) if on_device else _operator_spans(whole)
    seconds = seconds_by_category(span for span in spans if opened <= span.start <= closed)
    return Breakdown(on="gpu" if on_device else "cpu", span_seconds=sum(seconds.values()), seconds=seconds)


def seconds_by_category(spans: Iterable[TimedOp]) -> dict[Category, float]:
    """Seconds by category: each instant from the first start to the last end counts for one, the first by precedence
    of those that run then, and for idle where nothing runs."""
    order = {category: place for place, category in enumerate(CATEGORIES)}
    changes: list[tuple[float, int, int]] = []
    for span in spans:
        changes += [(span.start, order[span.category], 1), (span.end, order[span.category], -1)]
    running = [0] * len(CATEGORIES)
    microseconds = [0.0] * len(CATEGORIES)
    idle = order["idle"]
    before = None
    for moment, category, change in sorted(changes):
        if before is not None and moment > before:
            first = next((place for place, count in enumerate(running) if count), idle)
            microseconds[first] += moment - before
        running[category] += change
        before = moment
    return {category: microseconds[order[category]] / 1e6 for category in CATEGORIES}


class Ranges:
    """When each named range was open, on the thread that opened it."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._open: dict[tuple[str, Thread], list[tuple[float, float]]] = defaultdict(list)
        for event in events:
            if event.get("cat") == "user_annotation" and event["name"] in (RECOMPUTE, OPTIMIZER, LM_HEAD):
                self._open[event["name"], _thread(event)].append((event["ts"], event["ts"] + event["dur"]))
        for times in self._open.values():
            times.sort()

    def around(self, thread: Thread, moment: float) -> Set[str]:
        """Names of the ranges open on `thread` at `moment`. Those of one name do not nest."""
        found = set()
        for (name, opener), times in self._open.items():
            if opener == thread:
                place = bisect.bisect_right(times, (moment, float("inf"))) - 1
                if place >= 0 and moment <= times[place][1]:
                    found.add(name)
        return found


def _device_spans(on_device: Iterable[Event], events: Sequence[Event]) -> list[TimedOp]:
    """Events of the GPU. A kernel belongs to the ranges in which the host launched it: the call has its correlation."""
    ranges = Ranges(events)
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    spans = []
    for event in on_device:
        launch = launches.get(event.get("args", {}).get("correlation"))
        inside = ranges.around(_thread(launch), launch["ts"]) if launch is not None else frozenset()
        spans.append(TimedOp(event["ts"], event["ts"] + event["dur"], category_of(event["name"], inside)))
    return spans


def _operator_spans(events: Sequence[Event]) -> list[TimedOp]:
    """Events of the CPU: operators, where their thread is inside none that they called, and Gloo's transfers."""
    ranges = Ranges(events)
    threads: dict[Thread, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"].startswith(_OPERATORS):
            threads[_thread(event)].append(event)
    transfers = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith(_TRANSFER)]
    spans = [TimedOp(event["ts"], event["ts"] + event["dur"], "communication") for event in transfers]
    gloos = set(map(_thread, transfers))
    for thread, operators in threads.items():
        if thread in gloos and not any(event["name"].startswith(_POSTS) for event in operators):
            continue  # Gloo's own thread, which computes for its transfers alone
        for event, start, end in _own_times(operators):
            spans.append(TimedOp(start, end, category_of(event["name"], ranges.around(thread, event["ts"]))))
    return spans


def _own_times(operators: list[Event]) -> Iterable[tuple[Event, float, float]]:
    """(operator, start, end) of every stretch of one thread by the innermost operator that was open."""
    open_now: list[tuple[Event, float]] = []  # and when each ends
    now = 0.0

    def until(moment: float) -> Iterable[tuple[Event, float, float]]:
        nonlocal now
        while open_now and open_now[-1][1] <= moment:
            event, end = open_now.pop()
            if end > now:
                yield event, now, end
                now = end
        if open_now and moment > now:
            yield open_now[-1][0], now, moment
        now = max(now, moment)

    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        yield from until(event["ts"])
        open_now.append((event, event["ts"] + event["dur"]))
    yield from until(float("inf"))


def _window(events: Iterable[Event]) -> tuple[float, float]:
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] == STEP:
            return event["ts"], event["ts"] + event["dur"]
    return float("-inf"), float("inf")


def _thread(event: Event) -> Thread:
    return event["pid"], event["tid"]
