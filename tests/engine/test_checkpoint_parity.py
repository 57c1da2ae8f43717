"""On any number of ranks, under every layout, mask, schedule and method, what is kept changes no loss or gradient."""

from __future__ import annotations

import dataclasses
import importlib
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.distributed import arrange
from engine.parallelize import build_model
from engine.settings import Checkpoint, ModelShape, TrialSettings
from engine.task import context_parallel
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=3, hidden=16, ffn=24, heads=4, kv_heads=4, head_dim=4, vocab=61)
SETTINGS = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=48, dtype="fp64", kernel="reference")
FULL, WINDOW, SPARSE = "full", "sliding_window:9:2", "block_sparse:6:strided-3:causal"
DOCUMENTS = "documents:7,17,5,..."

Case = tuple[str, str, str, str, float, int, str]
# method, layout, schedule, mask, tail, every, offload: each value of each meets several of the others'.
CASES: list[Case] = [
    ("burst", "zigzag", "ring", "causal", 0.0, 1, "none"),
    ("burst", "zigzag", "ring", "causal", 1.0, 2, "all"),
    ("burst", "split_zigzag", "ring", "causal", 0.25, 1, "none"),
    ("burst", "split_zigzag", "double_ring", "causal", 0.5, 2, "inputs"),
    ("burst", "split_zigzag", "head_exchange", "causal", 0.37, 3, "all"),
    ("burst", "split_zigzag", "heads_inside", FULL, 0.25, 2, "none"),
    ("burst", "split_zigzag", "heads_across", "causal", 0.25, 1, "all"),
    ("burst", "zigzag", "head_exchange", "causal", 0.0, 2, "none"),
    ("burst", "auto", "auto", DOCUMENTS, 0.5, 1, "none"),
    ("burst", "contiguous", "ring", "causal", 0.37, 1, "all"),
    ("burst", "contiguous", "head_exchange", WINDOW, 0.25, 2, "none"),
    ("burst", "striped", "ring", "causal", 0.37, 2, "none"),
    ("burst", "striped", "double_ring", SPARSE, 0.5, 1, "inputs"),
    ("burst", "zigzag", "double_ring", FULL, 0.25, 1, "all"),
    ("burst", "zigzag", "heads_inside", SPARSE, 0.37, 3, "none"),
    ("ring", "auto", "auto", "causal", 0.25, 1, "none"),
    ("ring", "auto", "auto", WINDOW, 0.5, 2, "all"),
    ("megatron_cp", "auto", "auto", "causal", 0.5, 1, "none"),
    ("megatron_cp", "auto", "auto", DOCUMENTS, 0.37, 3, "inputs"),
    ("ulysses", "auto", "auto", "causal", 0.25, 2, "all"),
    ("ulysses", "auto", "auto", FULL, 0.0, 1, "none"),
]  # fmt: skip


def settings_of(case: Case, **sizes: Any) -> TrialSettings:
    method, layout, schedule, mask, tail, every, offload = case
    checkpoint = Checkpoint(every=every, tail=tail, offload=offload)
    choices = {"method": method, "layout": layout, "schedule": schedule, "mask": mask, "checkpoint": checkpoint}
    return dataclasses.replace(SETTINGS, **choices, **sizes)


def loss_and_gradients(settings: TrialSettings) -> dict[str, Tensor]:
    """Loss and every gathered gradient of one forward and backward on one fixed sequence. Collective."""
    package = "engine.burst" if settings.method == "burst" else f"baselines.{settings.method}"
    method = importlib.import_module(package).METHOD
    assert method.refuse(settings) is None
    world = arrange(settings, torch.device("cpu"))
    cp = context_parallel(settings, method, world)
    model = build_model(settings, method.attention(cp, settings), world.fsdp_mesh)
    tokens = torch.randint(SHAPE.vocab, (1, settings.seq_len + 1), generator=torch.Generator().manual_seed(1))
    loss = model(cp.shard(tokens[:, :-1]), cp.positions(settings.seq_len), cp.shard(tokens[:, 1:]))
    loss.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    return {"loss": total} | {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}


def worst_errors(cases: list[Case], sizes: dict[str, int], nodes: int) -> dict[str, float]:
    """Largest relative error of loss and gradients of each case against keeping everything, on so many nodes."""
    os.environ["NCCL_HOSTID"] = f"node{torch.distributed.get_rank() * nodes // sizes['world_size']}"
    expected: dict[str, dict[str, Tensor]] = {}
    found = {}
    for case in cases:
        settings = settings_of(case, **sizes)
        if settings.mask not in expected:
            everything = dataclasses.replace(SETTINGS, mask=settings.mask, checkpoint=Checkpoint(every=0), **sizes)
            expected[settings.mask] = loss_and_gradients(everything)
        pairs = zip(loss_and_gradients(settings).values(), expected[settings.mask].values(), strict=True)
        found[str(case)] = max(((value - truth).norm() / truth.norm()).item() for value, truth in pairs)
    return found


@pytest.mark.parametrize(
    ("world_size", "cp_size", "nodes", "cases"),
    [
        (1, 1, 1, CASES[::4]),
        (2, 2, 1, CASES[1::3]),
        (4, 2, 1, CASES[2::4]),
        (4, 4, 1, CASES[::2]),
        (4, 4, 2, CASES[1::2]),
    ],
    ids=["alone", "two", "two replicas of two", "four", "four on two nodes"],
)
def test_what_is_kept_changes_no_loss_and_no_gradient(
    world_size: int, cp_size: int, nodes: int, cases: list[Case]
) -> None:
    sizes = {"world_size": world_size, "cp_size": cp_size}
    for errors in run_on_ranks(world_size, worst_errors, cases, sizes, nodes):
        assert len(errors) == len(cases)
        assert {case: error for case, error in errors.items() if not error < 1e-11} == {}
