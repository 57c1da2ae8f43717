"""A prepared attention gives the bits of `burst_attention`, plans nothing in its calls, and refuses other tensors."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import threading
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine import ContextParallel, burst_attention, prepare_attention
from engine.attention import plan as planning
from engine.attention.algorithms.saved import save_suffix
from engine.attention.context import MAX_PLANS, PlanCache
from engine.attention.masks import BlockSparse, Causal, Documents, Full, Mask, SlidingWindow, Strided
from engine.attention.op import run_attention
from tests.plans import plan_attention
from tests.ranks import run_on_ranks
from tests.slow import slow

ROOT = Path(__file__).parents[4]
TOKENS = 48
MASKS: tuple[Mask, ...] = (
    Full(),
    Causal(),
    SlidingWindow(7),
    SlidingWindow(5, 2, 3),
    Documents((9, 20, 19)),
    Documents((30, 18), causal=False),
    BlockSparse(Strided(2), 8, causal=True),
)


def tensors(cp: ContextParallel, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2) -> list[torch.Tensor]:
    """q, k, v and dout of this rank."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, TOKENS, each, 8) for each in (heads, kv_heads, kv_heads, heads)]
    return [cp.shard(torch.randn(shape, generator=generator).to(dtype)).contiguous() for shape in shapes]


def results(attend: Any, inputs: list[torch.Tensor], **choices: Any) -> tuple[torch.Tensor, ...]:
    """out, perhaps lse, and gradients."""
    *shards, dout = inputs
    leaves = [t.clone().requires_grad_() for t in shards]
    found = attend(*leaves, **choices)
    outputs = found if isinstance(found, tuple) else (found,)
    loss = (outputs[0] * dout).sum() + sum(lse.square().nan_to_num(0, 0, 0).sum() for lse in outputs[1:])
    return (*(t.detach() for t in outputs), *torch.autograd.grad(loss, leaves))


def unequal_cases(layout: str, dtype: torch.dtype, kernel: str, all_of_them: bool) -> list[str]:
    """Calls whose prepared result differs in some bit from the one of a plan made for it alone."""
    cp = ContextParallel(layout=layout, node_size=2 if ContextParallel().size == 4 else None)
    inputs = tensors(cp, dtype)
    wrong = []
    schedules = ["ring", "double_ring"]
    if layout != "striped" or cp.size == 1:
        schedules += ["ulysses"] if cp.size < 4 else ["usp", "usp_transposed"]
    ways = list(itertools.product(("query", "key_value"), ((False, True), (True, False))))
    calls = list(enumerate(itertools.product(MASKS, schedules)))
    calls = [(*call, way) for at, call in calls for way in (ways if all_of_them else ways[at % 4 :][:1])]
    for mask, schedule, (backward, (return_lse, deterministic)) in calls:
        choices: dict[str, Any] = {
            "mask": mask,
            "schedule": schedule,
            "backward": backward,
            "kernel": kernel,
            "deterministic": deterministic,
        }
        plan = plan_attention(*inputs[:2], cp=cp, lse_gradient=return_lse, **choices)
        truth = results(lambda *t, p=plan, r=return_lse: run_attention(p, *t, return_lse=r), inputs)
        attend = prepare_attention(*inputs[:2], cp=cp, return_lse=return_lse, **choices)
        found = {
            "prepared": results(attend, inputs),
            "prepared, again": results(attend, inputs),
            "cached": results(burst_attention, inputs, cp=cp, return_lse=return_lse, **choices),
        }
        for name, tensors_found in found.items():
            if not all(torch.equal(a, b) for a, b in zip(tensors_found, truth, strict=True)):
                wrong.append(f"{name} {mask} {schedule} {backward} {return_lse}")
    return wrong


LAYOUTS = ("zigzag", "contiguous", "striped")
KERNELS = ((torch.float32, "reference"), (torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.float64, "reference"))


@pytest.mark.parametrize(
    ("world_size", "layout", "kernel", "all_of_them"),
    [
        (1, "zigzag", KERNELS[0], False),
        (2, "contiguous", KERNELS[1], False),
        (1, "zigzag", KERNELS[3], False),
        (4, "striped", KERNELS[2], False),
        *slow(*itertools.product((1, 2, 4), LAYOUTS, KERNELS, [True])),
    ],
)
def test_a_prepared_call_has_the_bits_of_one_that_is_planned_for_itself(
    world_size, layout, kernel, all_of_them
) -> None:
    for wrong in run_on_ranks(world_size, unequal_cases, layout, *kernel, all_of_them):
        assert wrong == []


def masks_of_steps() -> tuple[bool, int, int]:
    """(every step as `burst_attention`, plans of the steps, plans when all come again)."""
    cp = ContextParallel(layout="contiguous")
    inputs = tensors(cp, torch.float32)
    steps = [Documents((first, TOKENS - first)) for first in (5, 17, 30)]
    attend = prepare_attention(*inputs[:2], mask=steps[0], cp=cp)
    equal = True
    with mock.patch.object(planning, "plan_attention", side_effect=planning.plan_attention) as planned:
        for mask in steps:
            found = results(lambda *t, m=mask: attend(*t, mask=m), inputs)
            truth = results(burst_attention, inputs, mask=mask, cp=ContextParallel(layout="contiguous"))
            equal &= all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
        first = planned.call_count
        for mask in steps:
            results(lambda *t, m=mask: attend(*t, mask=Documents(m.lengths)), inputs)
        return equal, first - len(steps), planned.call_count - first


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_mask_of_the_steps_own_replaces_the_prepared_one_and_is_planned_once(world_size) -> None:
    # Each truth has a context of its own and is planned too; of the steps the first was prepared.
    assert run_on_ranks(world_size, masks_of_steps) == [(True, 2, 0)] * world_size


def prepared() -> tuple[Any, list[torch.Tensor]]:
    inputs = tensors(ContextParallel.single(), torch.float32)
    return prepare_attention(*inputs[:2]), inputs[:3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t[:, :40], r"prepared for q \(2, 48, 4, 8\), k \(2, 48, 2, 8\).* found q \(2, 40, 4, 8\)"),
        (lambda t: t.double(), "of torch.float32 on cpu, found .* of torch.float64 on cpu"),
        (lambda t: t.to("meta"), "on cpu, found .* on meta; prepare attention for these"),
        (lambda t: t.repeat(1, 1, 2, 1), r"found q \(2, 48, 8, 8\), k \(2, 48, 4, 8\)"),
    ],
)
def test_other_tensors_than_prepared_are_refused_with_what_was_expected(change, words) -> None:
    attend, inputs = prepared()
    with pytest.raises(ValueError, match=words):
        attend(*map(change, inputs))


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_tensor_of_another_dtype_or_shape_is_refused_also_by_a_call_with_a_plan(odd: int) -> None:
    attend, inputs = prepared()
    burst_attention(*inputs)
    for change in (torch.Tensor.double, lambda t: t[:1]):
        changed = [change(t) if place == odd else t for place, t in enumerate(inputs)]
        for call in (attend, burst_attention):
            with pytest.raises(ValueError, match=r"pass|reshape|prepare"):
                call(*changed)


@pytest.mark.parametrize("mask", [Causal, "causal"])
def test_what_is_no_mask_is_refused_by_a_prepared_call(mask) -> None:
    attend, inputs = prepared()
    with pytest.raises(ValueError, match=r"pass an object such as burst\.Causal"):
        attend(*inputs, mask=mask)


def test_a_length_the_mask_does_not_fit_is_refused_and_leaves_no_plan() -> None:
    cp = ContextParallel.single()
    _, inputs = prepared()
    for _ in range(2):
        with pytest.raises(ValueError, match="give lengths that sum to it"):
            burst_attention(*inputs, mask=Documents((5, 6)), cp=cp)
    assert len(cp.plans) == 0


def saved_results(tail: float) -> float:
    """Largest difference of a repeated call with `saved`, and of its gradients, to the first one's."""
    cp = ContextParallel()
    inputs = tensors(cp, torch.float32)
    attend = prepare_attention(*inputs[:2], cp=cp, return_lse=True, recompute=True, lse_gradient=False)

    def gradients(again: bool) -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in inputs[:3]]
        out, lse = attend(*leaves)
        if again:
            out, _ = attend(*leaves, saved=save_suffix(out, lse, cp, tail))
        return (out.detach(), *torch.autograd.grad((out * inputs[3]).sum(), leaves))

    return max((a - b).abs().max().item() for a, b in zip(gradients(False), gradients(True), strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("tail", "least"), [(1.0, 0), (0.5, 2e-6)])  # rows before the tail: in other blocks
def test_saved_outputs_work_with_a_prepared_call(world_size, tail, least) -> None:
    assert max(run_on_ranks(world_size, saved_results, tail)) <= least


@contextlib.contextmanager
def counted_plans():
    with mock.patch.object(planning, "plan_attention", side_effect=planning.plan_attention) as planned:
        yield planned


def test_a_second_call_plans_nothing_and_another_of_anything_plans_anew() -> None:
    cp, (q, k, v, _) = ContextParallel.single(), tensors(ContextParallel.single(), torch.float32)
    with counted_plans() as planned:
        for _ in range(3):
            burst_attention(q, k, v, cp=cp)
            with torch.no_grad():
                burst_attention(q.clone().requires_grad_(), k, v, cp=cp)
            burst_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, cp=cp, mask=Causal())
        assert planned.call_count == 1
        for number, changes in enumerate(
            [
                {"mask": Full()},
                {"scale": 0.5},
                {"kernel": "reference"},
                {"backward": "key_value"},
                {"deterministic": True},
                {"return_lse": True},
                {"grad_comm_dtype": "input"},
            ]
        ):
            for _ in range(2):
                burst_attention(q, k, v, cp=cp, **changes)
            assert planned.call_count == number + 2
        burst_attention(q[:1], k[:1], v[:1], cp=cp)
        burst_attention(q.double(), k.double(), v.double(), cp=cp)
        burst_attention(q, k, v, cp=ContextParallel.single())
        assert planned.call_count == 11


def test_calls_without_a_context_share_their_plans() -> None:
    q = torch.randn(1, 11, 1, 8)
    with counted_plans() as planned:
        burst_attention(q, q, q)
        burst_attention(q, q, q)
    assert planned.call_count <= 1


def test_a_context_keeps_a_bounded_number_of_plans_the_last_used_ones() -> None:
    cp, q = ContextParallel.single(), torch.randn(1, TOKENS, 1, 8)
    for first in range(1, 47):
        burst_attention(q, q, q, cp=cp, mask=Documents((first, TOKENS - first)))
    for left in range(40):
        burst_attention(q, q, q, cp=cp, mask=SlidingWindow(left))
    assert len(cp.plans) == MAX_PLANS
    with counted_plans() as planned:
        burst_attention(q, q, q, cp=cp, mask=SlidingWindow(0))
        burst_attention(q, q, q, cp=cp, mask=Documents((46, 2)))
        assert planned.call_count == 0
        burst_attention(q, q, q, cp=cp, mask=Documents((1, 47)))
        assert planned.call_count == 1
    cp.plans.clear()
    assert len(cp.plans) == 0


def context_is_freed() -> bool:
    """Whether nothing holds a context once its user does not, without the garbage collector."""
    gc.disable()
    try:
        cp = ContextParallel()
        inputs = tensors(cp, torch.float32)
        out = burst_attention(*(t.requires_grad_() for t in inputs[:3]), cp=cp)
        gone = weakref.ref(cp), weakref.ref(cp.plans)
        del cp
        out.backward(inputs[3])  # a plan outlives its context
        del out
        return all(reference() is None for reference in gone)
    finally:
        gc.enable()


@pytest.mark.parametrize("world_size", [1, 2])
def test_plans_do_not_keep_their_context_in_memory(world_size) -> None:
    assert run_on_ranks(world_size, context_is_freed) == [True] * world_size


def test_threads_share_one_plan() -> None:
    cp, (q, k, v, _) = ContextParallel.single(), tensors(ContextParallel.single(), torch.float32)
    truth = burst_attention(q, k, v, cp=ContextParallel.single())
    found: list[torch.Tensor] = []
    barrier = threading.Barrier(8)

    def call() -> None:
        barrier.wait()
        found.extend(burst_attention(q, k, v, cp=cp) for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 160
    assert all(torch.equal(truth, out) for out in found)
    assert len(cp.plans) == 1


def test_of_two_plans_made_at_once_the_first_is_kept() -> None:
    plans = PlanCache(size=2)
    assert plans.put("shape", "first") == "first"
    assert plans.put("shape", "second") == "first"
    plans.put("b", 1)
    plans.get("shape")
    plans.put("c", 2)
    assert (plans.get("shape"), plans.get("b"), plans.get("c")) == ("first", None, 2)


def functions_called(call: Any) -> list[str]:
    """Functions of the engine that a call runs, kernels and all that they call apart."""
    seen = []

    def note(frame, event, argument) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(str(ROOT / "engine")):
            return
        callers = frame
        while callers is not None and "/kernels/" not in callers.f_code.co_filename:
            callers = callers.f_back
        if callers is None:
            seen.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("mask", [Full(), Causal()])
def test_a_call_on_one_rank_runs_little_but_its_kernel(mask) -> None:
    inputs = tensors(ContextParallel.single(), torch.float32)
    q, k, v = (t.requires_grad_() for t in inputs[:3])
    attend = prepare_attention(q, k, mask=mask, kernel="cpu")

    def forward_and_backward() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), inputs[3])

    def unprepared() -> None:
        torch.autograd.grad(burst_attention(q, k, v, mask=mask, kernel="cpu"), (q, k, v), inputs[3])

    forward_and_backward()
    called = functions_called(forward_and_backward)
    assert not {"comm_plan", "ring_steps", "_ring_forward", "row_dot", "plan_attention", "update"} & set(called)
    assert len(called) <= 24, called
    unprepared()
    assert len(functions_called(unprepared)) <= 36
