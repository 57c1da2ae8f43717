"""A call that fails on one rank between two messages: it raises there, the others' wait ends, no later call hangs."""

from __future__ import annotations

import concurrent.futures
import datetime
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel, burst_attention
from engine.attention.algorithms.saved import save_suffix
from engine.attention.algorithms.ulysses import UlyssesPlan
from engine.attention.comm.p2p import BrokenContext, CallOrder, PeerLost, timeout_of
from engine.attention.kernels import Kernel
from engine.attention.masks import Causal, Documents, Full
from engine.attention.op import AttentionPlan, run_attention
from tests.plans import plan_attention
from tests.ranks import run_on_ranks
from tests.slow import slow

FAILING_RANK = 1


@dataclass
class RunsOutOfMemory:
    """A kernel whose second call of one kind fails."""

    kernel: Kernel
    kind: str  # forward or backward
    calls: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def forward(self, *inputs: Any) -> Any:
        return self._call("forward", inputs)

    def backward(self, *inputs: Any) -> Any:
        return self._call("backward", inputs)

    def _call(self, kind: str, inputs: tuple[Any, ...]) -> Any:
        self.calls += kind == self.kind
        if self.calls == 2:
            raise torch.OutOfMemoryError("no memory left for a tile")
        return getattr(self.kernel, kind)(*inputs)


def with_kernel(plan: AttentionPlan, kind: str) -> AttentionPlan:
    """The plan with a kernel that fails."""
    if isinstance(plan, UlyssesPlan):
        return replace(plan, inner=replace(plan.inner, kernel=RunsOutOfMemory(plan.inner.kernel, kind)))
    return replace(plan, kernel=RunsOutOfMemory(plan.kernel, kind))


def raised(call: Callable[[], object]) -> tuple[str, str]:
    """Type and words of what a call raises."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def failures(kind: str, choices: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """What a call raises in which one rank fails, what it raises once more, and what the backward of an earlier call
    and the gathering of a result raise then."""
    group = dist.new_group()
    shards = [torch.randn(1, 8, 4, 8, requires_grad=True) for _ in range(3)]
    started = time.perf_counter()
    burst_attention(*shards, mask=Full(), cp=ContextParallel(group), kernel="reference", **choices).sum().backward()
    slowest = torch.tensor([time.perf_counter() - started])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    # As long as this machine takes for a few calls, connections included: a rank that is slow has not failed.
    group = dist.new_group(timeout=datetime.timedelta(seconds=1 + 10 * slowest.item()))
    cp = ContextParallel(group)
    plan = plan_attention(*shards[:2], mask=Full(), cp=cp, kernel="reference", **choices)
    earlier = run_attention(plan, *shards)
    failing = with_kernel(plan, kind) if dist.get_rank() == FAILING_RANK else plan

    def call() -> None:
        run_attention(failing, *shards).sum().backward()

    return {
        "call": raised(call),
        "next call": raised(lambda: burst_attention(*shards, mask=Full(), cp=cp, kernel="reference", **choices)),
        "backward": raised(lambda: earlier.sum().backward()),
        "unshard": raised(lambda: cp.unshard(earlier)),
    }


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        ("forward", {"exchange": "direct"}),
        ("backward", {"exchange": "relay"}),
        ("forward", {"schedule": "ulysses", "num_head_chunks": 2}),
    ],
)
def test_after_a_call_that_failed_halfway_no_rank_hangs(kind, choices) -> None:
    for rank, found in enumerate(run_on_ranks(2, failures, kind, choices)):
        error, words = found.pop("call")
        if rank == FAILING_RANK:
            assert (error, words) == ("OutOfMemoryError", "no memory left for a tile")
        else:
            assert error == "PeerLost"
            assert words.startswith(f"rank {rank} exchanged tensors with rank")
            assert "find the first error of all ranks" in words
            # The first call is the one before. This rank may have had all that its own forward needs.
            assert f"rank {FAILING_RANK} failed in the {kind} of call 2 with OutOfMemoryError" in words
        for error, words in found.values():
            assert error == "BrokenContext"
            assert "an earlier call failed on this rank between two messages" in words
            assert ("no memory left for a tile" in words) == (rank == FAILING_RANK)
            assert "make a new process group and a new ContextParallel on all of them" in words


def short_timeout() -> datetime.timedelta:
    """In which a rank that is only slow still comes."""
    group = dist.new_group()
    started = time.perf_counter()
    attend(ContextParallel(group), "ring", 0).sum().backward()
    slowest = torch.tensor([time.perf_counter() - started])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return datetime.timedelta(seconds=1 + 3 * slowest.item())


def shards_of(number: int, tokens: int, **choices: Any) -> list[torch.Tensor]:
    """q, k and v of this rank, as leaves."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return [torch.randn(1, tokens, 6, 8, generator=generator, requires_grad=True, **choices) for _ in range(3)]


def attend(cp: ContextParallel, schedule: str, number: int, tokens: int = 12) -> torch.Tensor:
    return burst_attention(*shards_of(number, tokens), cp=cp, schedule=schedule)


def attend_again(cp: ContextParallel, schedule: str, tail: float) -> None:
    """A call, and the same one again from the saved rows of `tail`; 0: from none."""
    shards, named = shards_of(0, 12), {"cp": cp, "schedule": schedule, "recompute": True}
    out, lse = burst_attention(*shards, return_lse=True, **named)
    burst_attention(*shards, saved=save_suffix(out, lse, cp, tail), return_lse=True, **named)


def saved_otherwise(cp: ContextParallel, schedule: str) -> None:
    for tail in (0.5, 0.25, 0.5 if dist.get_rank() == FAILING_RANK else 0.25):
        attend_again(cp, schedule, tail)


def without_gradients(cp: ContextParallel, schedule: str) -> None:
    with torch.set_grad_enabled(dist.get_rank() != FAILING_RANK):
        out = attend(cp, schedule, 0)
    if out.requires_grad:
        out.sum().backward()
    attend(cp, schedule, 1).sum().backward()


def all_frozen(cp: ContextParallel, schedule: str) -> None:
    shards = [t.requires_grad_(dist.get_rank() != FAILING_RANK) for t in shards_of(0, 12)]
    out = burst_attention(*shards, cp=cp, schedule=schedule)
    if out.requires_grad:
        out.sum().backward()
    attend(cp, schedule, 1).sum().backward()


def other_order(cp: ContextParallel, schedule: str) -> None:
    outs = [attend(cp, schedule, number) for number in range(2)]
    for out in outs if dist.get_rank() == FAILING_RANK else reversed(outs):
        out.sum().backward()


def other_lengths(cp: ContextParallel, schedule: str) -> None:
    for tokens in (12, 24, 24 if dist.get_rank() == FAILING_RANK else 12):  # each has a plan before they differ
        attend(cp, schedule, 0, tokens)


def gathered_otherwise(cp: ContextParallel, schedule: str) -> None:
    floats, integers = (torch.ones(1, 4, 3, dtype=dtype) for dtype in (torch.float32, torch.int32))
    for each in (floats, integers, integers if dist.get_rank() == FAILING_RANK else floats):
        cp.unshard(each)


def gradients_gathered_otherwise(cp: ContextParallel, schedule: str) -> None:
    wholes = [cp.unshard(torch.ones(1, 4, 4, requires_grad=True), dim=dim) for dim in (1, 2)]
    for each in wholes if dist.get_rank() == FAILING_RANK else reversed(wholes):
        each.sum().backward()


def skipped(cp: ContextParallel, schedule: str) -> None:
    for tokens in (24, 12):
        attend(cp, schedule, 0, tokens)
    if dist.get_rank() != FAILING_RANK:
        attend(cp, schedule, 1)
    attend(cp, schedule, 0, 24)


WRONG_ORDERS = (without_gradients, all_frozen, other_order, other_lengths, saved_otherwise, skipped)


def sentences_of(cases: tuple[Callable[..., None], ...], schedule: str) -> dict[str, tuple[str, str]]:
    """What each case raises on this rank, in a context of its own."""
    node_size = {"usp": dist.get_world_size(), "double_ring": 1}.get(schedule)
    found, timeout = {}, short_timeout()
    for case in cases:
        cp = ContextParallel(dist.new_group(timeout=timeout), node_size=node_size)
        found[case.__name__] = raised(lambda case=case, cp=cp: case(cp, schedule))
        dist.barrier()
    return found


OTHER_SCHEDULES = ("double_ring", "ulysses", "usp", "all_gather")


@pytest.mark.parametrize(
    ("schedule", "cases"),
    [
        ("ring", WRONG_ORDERS),
        *((schedule, (other_order,)) for schedule in OTHER_SCHEDULES),
        *slow(*((schedule, WRONG_ORDERS) for schedule in OTHER_SCHEDULES)),
    ],
)
def test_ranks_whose_calls_differ_all_end_with_a_sentence_that_says_where_each_waited(schedule, cases) -> None:
    for rank, found in enumerate(run_on_ranks(2 if schedule == "ulysses" else 3, sentences_of, cases, schedule)):
        for case, (error, words) in found.items():
            assert error == "PeerLost", (case, words)
            assert "make the same calls in the same order on all of them" in words
            other = 1 - rank if rank < 2 else FAILING_RANK
            assert "this rank waited in the " in words
            assert f"rank {other} waited in the " in words, (case, words)


def differing_calls(schedule: str) -> dict[str, tuple[str, str]]:
    """What first calls raise that differ between ranks, and what a right one raises after all of them."""
    odd = dist.get_rank() == FAILING_RANK
    group = dist.new_group()
    cp = ContextParallel(group)
    other_layout = ContextParallel(group, layout="contiguous" if odd else "zigzag")
    tokens = 12 * dist.get_world_size()

    def call(cp: ContextParallel = cp, tokens: int = 12, dtype: torch.dtype = torch.float32, **choices: Any) -> None:
        burst_attention(*shards_of(0, tokens, dtype=dtype), cp=cp, **{"schedule": schedule, **choices})

    cases: dict[str, Callable[[], object]] = {
        "lengths": lambda: call(tokens=16 if odd else 12),
        "dtype": lambda: call(dtype=torch.float64 if odd else torch.float32),
        "mask": lambda: call(mask=Documents((8 if odd else 9, tokens - (8 if odd else 9)))),
        "schedule": lambda: call(schedule="ring" if odd else "all_gather"),
        "scale": lambda: call(scale=0.5 if odd else 0.25),
        "layout": lambda: call(cp=other_layout),
        "refused": lambda: call(tokens=4 if odd else 12),
        "refused mask": lambda: call(mask="causal" if odd else Full(), tokens=20),
        "refused device": lambda: burst_attention(*(t.to("meta" if odd else "cpu") for t in shards_of(0, 12)), cp=cp),
        "unshard": lambda: cp.unshard(torch.zeros(1, 16 if odd else 12)),
        "saved": lambda: attend_again(cp, schedule, 0.75 if odd else 0.5),
        "saved whole": lambda: attend_again(cp, schedule, 1.0 if odd else 0.5),
        "right": lambda: attend_again(cp, schedule, 0.25),
    }
    return {name: raised(case) for name, case in cases.items()}


@pytest.mark.parametrize("schedule", ["ring", "ulysses", "all_gather"])
def test_first_calls_that_differ_between_ranks_are_refused_on_all_before_any_message(schedule) -> None:
    world_size = 2 if schedule == "ulysses" else 3
    results = run_on_ranks(world_size, differing_calls, schedule)
    for rank, found in enumerate(results):
        assert found.pop("right") == ("nothing", "")
        for case, (error, words) in found.items():
            assert error == "ValueError", (case, words)
            if case.startswith("refused"):
                own = rank == FAILING_RANK
                assert words.startswith("rank 1 refused this call, and no rank can make it alone; rank 1 said: ") != own
            else:
                assert words.startswith("ranks do not agree on this call: rank 0 has "), (case, words)
                assert "make it with the same shapes, mask and choices on all ranks of the context" in words
    assert "q [1, 12, 6, 8], k [1, 12, 6, 8], v [1, 12, 6, 8], rank 1 has q [1, 16, 6, 8]" in results[0]["lengths"][1]


def test_a_rank_that_does_not_come_to_a_first_call_is_named() -> None:
    for rank, found in enumerate(run_on_ranks(2, sentences_of, (absent,), "ring")):
        error, words = found["absent"]
        if rank != FAILING_RANK:
            assert error == "PeerLost"
            assert f"rank {FAILING_RANK} did not come to this call within " in words
            assert "make the same calls in the same order on all ranks" in words


def known_beside_new_mask(cp: ContextParallel, schedule: str) -> None:
    attend(cp, schedule, 0)
    mask = Causal() if dist.get_rank() == FAILING_RANK else Full()  # objects of equal hash
    burst_attention(*shards_of(0, 12), cp=cp, schedule=schedule, mask=mask)


def known_beside_new_length(cp: ContextParallel, schedule: str) -> None:
    for tokens in (12, 12 if dist.get_rank() == FAILING_RANK else 8):
        attend(cp, schedule, 0, tokens)


def known_beside_saved(cp: ContextParallel, schedule: str) -> None:
    attend_again(cp, schedule, 0.0 if dist.get_rank() == FAILING_RANK else 0.5)


ONE_NEW = {
    known_beside_saved: "",
    known_beside_new_mask: " (mask Full full; the last new kind had mask Causal causal)",
    known_beside_new_length: (
        " (q [1, 8, 6, 8], k [1, 8, 6, 8], v [1, 8, 6, 8]; the last new kind had q [1, 12, 6, 8], k [1, 12, 6, 8], "
        "v [1, 12, 6, 8])"
    ),
}


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_new_kind_of_call_on_some_ranks_alone_is_shown_to_all(world_size) -> None:
    others = "rank 0" if world_size == 2 else "ranks 0, 2"
    for rank, found in enumerate(run_on_ranks(world_size, sentences_of, tuple(ONE_NEW), "ring")):
        for case, difference in ONE_NEW.items():
            error, words = found[case.__name__]
            assert error == "PeerLost", (case, words)
            if rank == FAILING_RANK:
                assert f"{others} began a new kind of call that this rank did not{difference}" in words
            else:
                assert f"rank {FAILING_RANK} did not come to this call{difference} within " in words


def test_ranks_that_gather_different_tensors_end_with_a_sentence_and_not_with_garbage() -> None:
    cases = (gathered_otherwise, gradients_gathered_otherwise)
    for rank, found in enumerate(run_on_ranks(2, sentences_of, cases, "ring")):
        for case, (error, words) in found.items():
            assert error == "PeerLost", (case, words)
            assert f"rank {rank} exchanged tensors with all other ranks and they did not come" in words


def calls_of_threads() -> list[tuple[str, str]]:
    """What each of two threads raises that call with one context at once."""
    cp, both = ContextParallel(dist.new_group(timeout=short_timeout())), threading.Barrier(2)
    attend(cp, "ring", 0)

    def calls() -> tuple[str, str]:
        both.wait()
        return raised(lambda: [attend(cp, "ring", 0) for _ in range(200)])

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = [each.result() for each in [pool.submit(calls) for _ in range(2)]]
    dist.barrier()
    return found


def test_threads_that_call_at_once_all_end_with_an_error() -> None:
    found = run_on_ranks(2, calls_of_threads)
    assert {error for of_rank in found for error, _ in of_rank} <= {"BrokenContext", "PeerLost"}, found
    assert any("two threads of this rank were in calls of one ContextParallel at once" in str(each) for each in found)


def absent(cp: ContextParallel, schedule: str) -> None:
    if dist.get_rank() != FAILING_RANK:
        attend(cp, schedule, 0)


def refused_then_right() -> tuple[str, bool]:
    """What a refusal before the first message raises, and whether the next call has a result."""
    cp = ContextParallel()
    wrong, right = torch.zeros(1, 5, 2, 8), torch.zeros(1, 8, 2, 8)
    unsupported_reason = raised(lambda: burst_attention(wrong, wrong, wrong, cp=cp))[0]
    return unsupported_reason, torch.isfinite(burst_attention(right, right, right, cp=cp)).all().item()


def test_a_call_that_is_refused_before_any_message_breaks_nothing() -> None:
    assert run_on_ranks(2, refused_then_right) == [("ValueError", True)] * 2


def test_a_single_rank_can_call_again_after_a_failure() -> None:
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    plan = plan_attention(q, q, mask=Full(), cp=ContextParallel.single(), kernel="reference")
    failing = with_kernel(plan, "forward")
    run_attention(failing, q, q, q)
    with pytest.raises(torch.OutOfMemoryError):
        run_attention(failing, q, q, q)
    assert torch.isfinite(run_attention(plan, q, q, q)).all()


def timeouts() -> set[float]:
    """Timeouts, in seconds, of the groups that a context makes out of one of 77."""
    cp = ContextParallel(dist.new_group(timeout=datetime.timedelta(seconds=77)), node_size=1)
    q = torch.zeros(1, 8, 2, 8)
    before = set(dist.distributed_c10d._world.pg_map)
    for schedule in ("ring", "double_ring", "ulysses"):
        burst_attention(q, q, q, cp=cp, schedule=schedule)
    made = set(dist.distributed_c10d._world.pg_map) - before
    assert made
    return {timeout_of(group).total_seconds() for group in made}


def test_the_groups_of_a_context_have_the_timeout_of_its_group() -> None:
    assert run_on_ranks(2, timeouts) == [{77.0}] * 2


def test_the_first_failure_is_reported_also_for_an_interrupt() -> None:
    order = CallOrder()
    with pytest.raises(KeyboardInterrupt), order.kept(), order.kept():
        raise KeyboardInterrupt
    for _ in range(2):
        with pytest.raises(BrokenContext, match="KeyboardInterrupt: no message"), order.kept():
            raise AssertionError("steps after a failure do not run")
    assert issubclass(PeerLost, RuntimeError)
