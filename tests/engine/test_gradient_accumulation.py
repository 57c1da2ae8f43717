"""Micro-batches: the sequences of one big batch in its order, its mean, and gradients that never pile up whole."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.settings import TrialSettings
from engine.shape import ModelShape
from tests.engine.parity import errors, parallel_runs, task_of
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="odd", layers=2, hidden=18, ffn=30, heads=6, kv_heads=2, head_dim=6, vocab=257)
# Two replicas of one rank, six sequences each.
BIG = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=16, world_size=2, batch_size=6, dtype="fp64")
SMALL = dataclasses.replace(BIG, batch_size=2, gradient_accumulation=3)
# Four replicas on two nodes, over which parameters are repeated.
BIG_HYBRID, SMALL_HYBRID = (
    dataclasses.replace(each, world_size=4, sharding="hybrid", emulate_nodes=2) for each in (BIG, SMALL)
)


def tokens_and_targets(settings: TrialSettings) -> tuple[list[Any], set[int]]:
    _, task = task_of(settings)
    batches = task.batches(4)
    whole = torch.cat([torch.stack([batch.tokens_BL, batch.labels_BL]) for batch in batches], dim=1)
    return whole.tolist(), {int(batch.targets) for batch in batches}


class Reductions(TorchDispatchMode):
    """Counts the collectives that sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scattered = self.whole = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.scattered += func.namespace == "c10d" and "reduce_scatter" in func.name()
        self.whole += func.namespace == "c10d" and "allreduce" in func.name()
        return func(*args, **(kwargs or {}))


def reductions_of(settings: TrialSettings) -> tuple[int, int]:
    """Collectives of one step that reduce parameters' gradients within a mesh axis, and those over a whole group."""
    _, task = task_of(settings)
    with Reductions() as reductions:
        task.gradients(0)
    return reductions.scattered, reductions.whole


def everything() -> dict[str, Any]:
    both = {"big": BIG, "small": SMALL}
    return {
        "batches": {name: tokens_and_targets(settings) for name, settings in both.items()},
        "reductions": {name: reductions_of(settings) for name, settings in both.items()},
        "gradients": parallel_runs(both),
    }


def test_micro_batches_are_one_big_batch_in_parts() -> None:
    ranks = run_on_ranks(2, everything)
    for rank in ranks:
        big, small = rank["batches"]["big"], rank["batches"]["small"]
        assert np.array(big[0]).shape == (2, 6, 16)
        assert small == big == (big[0], {2 * 6 * 16})
        # Embedding, two blocks, head and the norm before it, each once a micro-batch: no rank keeps them whole.
        # The one sum over a whole group is that of the targets.
        assert rank["reductions"] == {"big": (5, 1), "small": (15, 1)}
    assert ranks[0]["batches"]["big"][0] != ranks[1]["batches"]["big"][0]  # replicas learn from different sequences
    found, truth = ranks[0]["gradients"]["small"], ranks[0]["gradients"]["big"]
    assert {what: error for what, error in errors(found, truth).items() if not error < 1e-12} == {}


def hybrid() -> dict[str, Any]:
    both = {"big": BIG_HYBRID, "small": SMALL_HYBRID}
    return {
        "reductions": {name: reductions_of(settings) for name, settings in both.items()},
        "gradients": parallel_runs(both),
    }


def test_nodes_sum_their_gradients_once_however_many_micro_batches() -> None:
    ranks = run_on_ranks(4, hybrid)
    for rank in ranks:
        assert rank["reductions"] == {"big": (5, 6), "small": (15, 6)}  # five units and the targets
    found, truth = ranks[0]["gradients"]["small"], ranks[0]["gradients"]["big"]
    assert {what: error for what, error in errors(found, truth).items() if not error < 1e-12} == {}
