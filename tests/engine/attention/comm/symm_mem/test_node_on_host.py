"""Attention by copy engine, call after call, on ranks whose memory the others map: every transfer lands in its place.

What a GPU adds, streams that run beside each other, is seen by the tests marked gpu.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from engine.attention.algorithms.captured import CapturedPlan, captured_unsupported_reason

from engine import ContextParallel
from engine.attention.kernels import flex
from engine.attention.kernels.around import AroundKernel
from engine.attention.masks import parse_mask
from engine.attention.op import run_attention
from engine.attention.reference import dense_gradients
from tests.engine.attention.calls_in_a_row import worst_relative_error
from tests.engine.attention.comm.symm_mem.node_on_host import Graph, become_a_gpu, by_copy_engine, calls
from tests.plans import plan_attention
from tests.ranks import run_on_ranks

RANKS, SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM, STEPS = 4, 64, 32, 16, 8, 3
MASKS = ("causal", "sliding_window:9", "documents:20,44")
CHOICES = (
    {"schedule": "ulysses", "num_head_chunks": 1},
    {"schedule": "ulysses", "num_head_chunks": 2},
    {"schedule": "ulysses", "num_head_chunks": 4},  # more than there are receive slots
    {"schedule": "ring", "backward": "query"},
    {"schedule": "ring", "backward": "key_value"},
)


def worst_errors(mask_name: str, captured: bool, any_order: bool = False) -> dict[str, float]:
    """By case. `any_order`: the ranks' graphs run in orders of their own."""
    become_a_gpu()
    if any_order:
        Graph.any_order = random.Random(dist.get_rank())
    return {
        f"{choices}, recompute {recompute}": worst_error(mask_name, choices, recompute, captured)
        for choices in CHOICES
        for recompute in (False, True)
    }


def worst_error(mask_name: str, choices: dict, recompute: bool, captured: bool) -> float:
    """Of out and gradients of several steps, each with all forwards before the first backward, in float64."""
    calls.clear()
    cp, mask = ContextParallel(), parse_mask(mask_name)
    torch.manual_seed(0)
    shapes = [(1, SEQ_LEN, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    layers = [[torch.randn(shape, dtype=torch.float64) for shape in shapes] for _ in range(3)]
    local = [[cp.shard(tensor, 1) for tensor in layer] for layer in layers]
    plan = by_copy_engine(
        plan_attention(*local[0][:2], mask=mask, cp=cp, kernel="reference", **choices), dist.group.WORLD
    )
    if captured:
        plan = CapturedPlan(plan)
    cp.traffic.reset()
    worst = max(worst_error_of_a_step(plan, layers, local, mask, recompute) for _ in range(STEPS))
    # Of the forwards and of the backwards, the first one is launched.
    assert calls["graph launch"] == (2 * (STEPS * len(layers) - 1) if captured else 0)
    planned = plan.sent_bytes(gathered=not recompute)
    assert cp.traffic.sent_bytes == STEPS * len(layers) * (planned.forward + planned.backward).total
    return worst


def worst_error_of_a_step(plan, layers: list, local: list, mask, recompute: bool) -> float:
    """Of the layers' results; `local` are this rank's tokens of `layers`."""
    cp = plan.cp
    leaves = [[tensor.clone().requires_grad_() for tensor in layer[:3]] for layer in local]
    outs = [run_attention(plan, *layer, recompute=recompute) for layer in leaves]
    found = []
    for out, layer, (*_, dout) in reversed(list(zip(outs, leaves, local, strict=True))):
        found.append((out.detach(), *torch.autograd.grad(out, layer, dout)))
    return max(
        worst_relative_error(result, [cp.shard(truth, 1) for truth in dense_gradients(*whole, mask)])
        for result, whole in zip(reversed(found), layers, strict=True)
    )


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_by_copy_engine_equals_dense_attention(mask, captured) -> None:
    for found in run_on_ranks(RANKS, worst_errors, mask, captured):
        assert {case: error for case, error in found.items() if not error < 1e-12} == {}


@pytest.mark.parametrize("mask", MASKS)
def test_graphs_whose_branches_run_in_any_order_end_with_the_same_results(mask) -> None:
    """A device may queue a branch that waits for a peer before the one that the peer waits for."""
    for found in run_on_ranks(RANKS, worst_errors, mask, True, True):
        assert {case: error for case, error in found.items() if not error < 1e-12} == {}


@dataclass(frozen=True)
class _Watched(AroundKernel):
    """Notes the strides of what it is given."""

    seen: list[tuple] = field(default_factory=list)

    def forward(self, q_BLND, k_BMKD, v_BMKD, band, scale):
        self.seen.append(tuple(tensor.stride() for tensor in (q_BLND, k_BMKD, v_BMKD)))
        return self.kernel.forward(q_BLND, k_BMKD, v_BMKD, band, scale)


def small_ring(kernel=None):
    """A plan by copy engine with a watched kernel, or with `kernel`, and shards whose heads lie before their tokens."""
    become_a_gpu()
    shards = [torch.randn(1, 4, 16, 8, dtype=torch.float64).transpose(1, 2) for _ in range(3)]
    plan = plan_attention(
        *shards[:2], mask=parse_mask("causal"), cp=ContextParallel(), kernel="reference", schedule="ring"
    )
    return by_copy_engine(replace(plan, kernel=kernel or _Watched(plan.kernel)), dist.group.WORLD), shards


def strides_by_call() -> list[list[tuple]]:
    plan, shards = small_ring()
    captured = CapturedPlan(plan)
    found = []
    for _ in range(2):
        run_attention(captured, *shards)
        found.append(list(plan.kernel.seen))
        plan.kernel.seen.clear()
    return found


def test_a_capture_gives_kernels_the_strides_that_they_were_launched_with() -> None:
    """So a capture compiles nothing, whatever the strides of the shards."""
    for launched, captured in run_on_ranks(2, strides_by_call):
        assert len(launched) == 2
        assert captured == launched


def differences_after_inference() -> list[float]:
    """Of calls under inference mode and outside it, from the first one."""
    plan, shards = small_ring()
    captured, outs = CapturedPlan(plan), []
    for mode in (True, False, True, False):
        with torch.inference_mode(mode):
            outs.append(run_attention(captured, *shards, recompute=True))
    leaves = [shard.clone().requires_grad_() for shard in shards]
    outs.append(run_attention(captured, *leaves, recompute=True))
    outs[-1].sum().backward()
    return [(out - outs[0]).abs().max().item() for out in outs]


def test_captured_passes_may_be_first_called_under_inference_mode() -> None:
    for differences in run_on_ranks(2, differences_after_inference):
        assert differences == [0.0] * 5


def reason_of_flex() -> str | None:
    return captured_unsupported_reason(small_ring(flex.KERNEL)[0])


def test_a_kernel_whose_masks_a_cache_may_free_is_not_captured() -> None:
    for reason in run_on_ranks(2, reason_of_flex):
        assert "found kernel flex" in reason
