"""Attention by copy engine, call after call, on ranks whose memory the others map: every transfer lands in its place.

What a GPU adds, streams that run beside each other, is seen by the tests marked gpu.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel
from engine.attention.masks import parse_mask
from engine.attention.op import run_attention
from engine.attention.reference import dense_gradients
from engine.measurement import relative_errors
from tests.engine.attention.comm.symm_mem.node_on_host import become_a_gpu, by_copy_engine
from tests.plans import plan_attention
from tests.ranks import run_on_ranks
from tests.slow import slow

RANKS, SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM, STEPS = 4, 32, 32, 16, 4, 2
MASKS = ("documents:10,22", *slow("causal", "sliding_window:9"))
CHOICES = (
    {"schedule": "ulysses", "num_head_chunks": 1},
    {"schedule": "ulysses", "num_head_chunks": 2},
    {"schedule": "ulysses", "num_head_chunks": 4},  # more than there are receive slots
    {"schedule": "ring", "backward": "query"},
    {"schedule": "ring", "backward": "key_value"},
)


def worst_errors(mask_name: str) -> dict[str, float]:
    """By case."""
    become_a_gpu()
    return {
        f"{choices}, recompute {recompute}": worst_error(mask_name, choices, recompute)
        for choices in CHOICES
        for recompute in (False, True)
    }


def worst_error(mask_name: str, choices: dict, recompute: bool) -> float:
    """Of out and gradients of several steps, each with all forwards before the first backward, in float64."""
    cp, mask = ContextParallel(), parse_mask(mask_name)
    torch.manual_seed(0)
    shapes = [(1, SEQ_LEN, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    layers = [[torch.randn(shape, dtype=torch.float64) for shape in shapes] for _ in range(3)]
    local = [[cp.shard(tensor, 1) for tensor in layer] for layer in layers]
    plan = by_copy_engine(
        plan_attention(*local[0][:2], mask=mask, cp=cp, kernel="reference", **choices), dist.group.WORLD
    )
    cp.traffic.reset()
    worst = max(worst_error_of_a_step(plan, layers, local, mask, recompute) for _ in range(STEPS))
    planned = plan.choice.sent(plan.cp.rank, gathered=not recompute)
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
        max(relative_errors(result, [cp.shard(truth, 1) for truth in dense_gradients(*whole, mask)]))
        for result, whole in zip(reversed(found), layers, strict=True)
    )


@pytest.mark.parametrize("mask", MASKS)
def test_attention_by_copy_engine_equals_dense_attention(mask) -> None:
    for found in run_on_ranks(RANKS, worst_errors, mask):
        assert {case: error for case, error in found.items() if not error < 1e-12} == {}
