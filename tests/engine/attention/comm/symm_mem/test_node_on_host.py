"""Attention by copy engine, call after call, on ranks whose memory the others map: every transfer lands in its place.

What a GPU adds, streams that run beside each other, is seen by the tests marked gpu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel
from engine.attention.masks import Mask, parse_mask
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


Tensors = Sequence[torch.Tensor]


def worst_errors(mask_name: str) -> dict[str, float]:
    """By case."""
    become_a_gpu()
    mask = parse_mask(mask_name)
    torch.manual_seed(0)
    shapes = [(1, SEQ_LEN, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    layers = [[torch.randn(shape, dtype=torch.float64) for shape in shapes] for _ in range(3)]
    truths = [dense_gradients(*layer, mask) for layer in layers]
    return {
        f"{choices}, recompute {recompute}": worst_error(mask, layers, truths, choices, recompute)
        for choices in CHOICES
        for recompute in (False, True)
    }


def worst_error(
    mask: Mask, layers: Sequence[Tensors], truths: Sequence[Tensors], choices: dict[str, Any], recompute: bool
) -> float:
    """Of out and gradients of several steps, each with all forwards before the first backward, in float64."""
    cp = ContextParallel()
    local, expected = ([[cp.shard(tensor, 1) for tensor in each] for each in whole] for whole in (layers, truths))
    plan = by_copy_engine(
        plan_attention(*local[0][:2], mask=mask, cp=cp, kernel="reference", **choices), dist.group.WORLD
    )
    cp.traffic.reset()
    worst = 0.0
    for _ in range(STEPS):
        leaves = [[tensor.clone().requires_grad_() for tensor in layer[:3]] for layer in local]
        outs = [run_attention(plan, *layer, recompute=recompute) for layer in leaves]
        for out, layer, (*_, dout), truth in reversed(list(zip(outs, leaves, local, expected, strict=True))):
            found = (out.detach(), *torch.autograd.grad(out, layer, dout))
            worst = max(worst, *relative_errors(found, truth))
    planned = plan.choice.sent(plan.cp.rank, gathered=not recompute)
    assert cp.traffic.sent_bytes == STEPS * len(layers) * (planned.forward + planned.backward).total
    return worst


@pytest.mark.parametrize("mask", MASKS)
def test_attention_by_copy_engine_equals_dense_attention(mask) -> None:
    for found in run_on_ranks(RANKS, worst_errors, mask):
        assert {case: error for case, error in found.items() if not error < 1e-12} == {}
