"""Arithmetic of a step's time on events made by hand: microseconds, as traces have them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ops.ranges import OPTIMIZER, RECOMPUTE, STEP
from engine.profile.breakdown import CATEGORIES, Category, Span, breakdown_of, seconds_by_category

FLASH = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_knob_3"
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
PLAIN = "void at::native::elementwise_kernel<128, 2>"
PROCESS = 100


def event(category: str, name: str, start: float, length: float, thread: int = 1, **arguments: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "pid": PROCESS, "tid": thread,
        "args": arguments,
    }  # fmt: skip


def kernel(name: str, start: float, length: float, correlation: int = 0) -> dict[str, Any]:
    return event("kernel", name, start, length, thread=7, correlation=correlation)


def launch(start: float, correlation: int, thread: int = 1) -> dict[str, Any]:
    return event("cuda_runtime", "cudaLaunchKernel", start, 1, thread, correlation=correlation)


def microseconds(events: list[dict[str, Any]]) -> dict[Category, int]:
    """What the breakdown of `events` has that is not 0."""
    return {name: round(1e6 * seconds) for name, seconds in breakdown_of(events).seconds.items() if seconds}


def test_an_instant_counts_for_the_first_category_of_those_that_run() -> None:
    copy = event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 0, 100)
    events = [kernel(FLASH, 10, 20), kernel("nvjet_tst", 20, 20), kernel(NCCL, 35, 25), copy]
    assert microseconds(events) == {"attention_forward": 20, "matmul": 10, "communication": 20, "copies": 50}


def test_where_nothing_runs_is_idle() -> None:
    assert microseconds([kernel(FLASH, 0, 10), kernel(FLASH, 25, 5)]) == {"attention_forward": 15, "idle": 15}


def test_two_of_one_category_at_once_count_once() -> None:
    assert microseconds([kernel(FLASH, 0, 10), kernel(FLASH, 5, 10), kernel(NCCL, 7, 1)]) == {"attention_forward": 15}


@given(
    st.lists(
        st.builds(
            lambda start, length, category: Span(start, start + length, category),
            st.integers(0, 50),
            st.integers(0, 20),
            st.sampled_from(CATEGORIES[:-1]),
        ),
        min_size=1,
    )
)
def test_categories_add_up_to_the_span_and_agree_with_every_single_instant(spans: list[Span]) -> None:
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    expected = dict.fromkeys(CATEGORIES, 0)
    for moment in range(int(first), int(last)):
        running = [span.category for span in spans if span.start <= moment < span.end]
        expected[min(running, key=CATEGORIES.index) if running else "idle"] += 1
    found = seconds_by_category(spans)
    assert list(found) == list(CATEGORIES)
    assert {name: round(1e6 * seconds) for name, seconds in found.items()} == expected
    assert sum(found.values()) == pytest.approx((last - first) / 1e6)


def test_a_kernel_is_of_the_range_in_which_its_thread_launched_it() -> None:
    events = [
        event("user_annotation", RECOMPUTE, 0, 100, thread=1),
        event("user_annotation", OPTIMIZER, 200, 100, thread=1),
        launch(50, correlation=1),  # inside, and the kernel runs long after
        launch(50, correlation=2, thread=2),  # at the same time on another thread
        launch(150, correlation=3),  # between the ranges
        launch(250, correlation=4),
        kernel(FLASH, 1000, 10, correlation=1),
        kernel(PLAIN, 1010, 1, correlation=1),
        kernel(FLASH, 1011, 20, correlation=2),
        kernel(PLAIN, 1031, 2, correlation=3),
        kernel(PLAIN, 1033, 4, correlation=4),
        kernel(PLAIN, 1037, 8, correlation=5),  # launched by what the profiler did not see
    ]
    assert microseconds(events) == {
        "attention_recomputed": 10,
        "recomputed": 1,
        "attention_forward": 20,
        "other_compute": 10,
        "optimizer": 4,
    }


def test_a_driver_call_launches_as_well_as_one_of_the_runtime() -> None:
    call = event("cuda_driver", "cuLaunchKernelEx", 5, 1, correlation=1)
    assert microseconds([event("user_annotation", RECOMPUTE, 0, 10), call, kernel(PLAIN, 20, 3, 1)]) == {
        "recomputed": 3
    }


def test_events_that_began_before_the_step_do_not_count() -> None:
    before, step = kernel(PLAIN, 0, 90), event("user_annotation", STEP, 95, 100)
    after = kernel(NCCL, 200, 50)
    breakdown = breakdown_of([before, step, kernel(FLASH, 100, 10), kernel(FLASH, 120, 10), after])
    assert breakdown.on == "gpu"
    assert breakdown.span_seconds == pytest.approx(30e-6)
    assert sum(breakdown.seconds.values()) == breakdown.span_seconds


def test_the_mark_of_a_range_on_the_device_is_no_work() -> None:
    mark = event("gpu_user_annotation", OPTIMIZER, 0, 1000, thread=7)
    assert microseconds([mark, kernel(FLASH, 10, 5)]) == {"attention_forward": 5}


def test_on_a_cpu_an_operator_has_the_time_in_which_it_calls_no_other() -> None:
    events = [
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 0, 100),  # contains, and does nothing
        event("cpu_op", "aten::matmul", 10, 50),
        event("cpu_op", "aten::mm", 20, 30),
        event("cpu_op", "aten::mul", 70, 10),
    ]
    breakdown = breakdown_of(events)
    assert breakdown.on == "cpu"
    assert microseconds(events) == {"other_compute": 30, "matmul": 30, "idle": 10}


def test_on_a_cpu_transfers_count_where_no_operator_runs_and_their_threads_do_nothing_else() -> None:
    events = [
        event("user_annotation", RECOMPUTE, 0, 12),
        event("cpu_op", "aten::mm", 0, 10),
        event("cpu_op", "c10d::send", 10, 2),
        event("user_annotation", "gloo:send", 12, 20),  # until it is through, on the thread that posted it
        event("cpu_op", "aten::mul", 14, 4),
        event("user_annotation", "gloo:all_reduce", 40, 10, thread=2),
        event("cpu_op", "aten::copy_", 42, 5, thread=2),
    ]
    assert microseconds(events) == {"recomputed": 10, "communication": 28, "other_compute": 4, "idle": 8}


def test_a_trace_without_events_has_no_time() -> None:
    assert breakdown_of([event("cpu_op", "PythonSubclass", 0, 10)]).span_seconds == 0
