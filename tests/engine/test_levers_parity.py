"""Loss, gradients and parameters equal a one-process dense run under every pair of memory levers and shardings."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.settings import ModelShape, TrialSettings
from tests.engine.parity import dense_parameters, dense_run, errors, parallel_runs
from tests.ranks import run_on_ranks

# Odd sizes on purpose: no dimension divides by 4, so that FSDP2's last ranks hold short shards or none.
SHAPE = ModelShape(name="odd", layers=2, hidden=18, ffn=30, heads=6, kv_heads=2, head_dim=6, vocab=257)
SETTINGS = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=48, dtype="fp64")
# Off and on of each; 48 tokens per rank and fewer go in 5 runs, the last one shorter.
LEVERS: dict[str, tuple[Any, Any]] = {
    "mlp_tiles": (1, 5),
    "optimizer_offload": (False, True),
    "gradient_accumulation": (1, 2),
    "sharding": ("full", "hybrid"),
    "lm_head_fusion": (True, False),
}
# Six rows in which every two levers meet in all four ways.
ROWS = ((0, 0, 0, 0, 0), (0, 1, 1, 1, 1), (1, 0, 1, 1, 0), (1, 1, 0, 1, 0), (1, 1, 1, 0, 1), (1, 0, 0, 0, 1))
WORLDS = [(1, 1), (2, 2), (4, 2), (4, 4)]  # ranks, of which so many share a sequence


def cases(world_size: int, cp_size: int, **changes: Any) -> dict[str, TrialSettings]:
    """One trial per row. Every trial has two sequences per replica and step, in one micro-batch or two."""
    found = {}
    for row in ROWS:
        levers = {name: values[on] for (name, values), on in zip(LEVERS.items(), row, strict=True)}
        sizes = {"batch_size": 2 // levers["gradient_accumulation"], "emulate_nodes": min(2, world_size)}
        found[str(row)] = dataclasses.replace(
            SETTINGS, world_size=world_size, cp_size=cp_size, **sizes, **levers, **changes
        )
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cache directory of this test's own."""
    monkeypatch.setenv("BURST_CACHE", str(tmp_path))
    return str(tmp_path)


def test_every_two_levers_meet_in_every_way() -> None:
    for first, second in itertools.combinations(range(len(LEVERS)), 2):
        assert {(row[first], row[second]) for row in ROWS} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def in_both_types(cache: str, fp32: dict[str, TrialSettings], fp64: dict[str, TrialSettings]) -> Any:
    return parallel_runs(cache, fp32), parallel_runs(cache, fp64, steps=2)


@pytest.mark.parametrize(("world_size", "cp_size"), WORLDS)
def test_loss_gradients_and_updates_equal_a_dense_run(world_size: int, cp_size: int, cache: str) -> None:
    narrow, wide = cases(world_size, cp_size, dtype="fp32"), cases(world_size, cp_size)
    settings = next(iter(wide.values()))
    truth, trained = dense_run(settings, torch.float64), dense_parameters(settings, steps=2)
    found32, found64 = run_on_ranks(world_size, in_both_types, cache, narrow, wide)[0]
    for found, limit in ((found32, 1e-5), (found64, 1e-9)):
        for row, result in found.items():
            assert (row, {what: error for what, error in errors(result, truth).items() if not error < limit}) == (
                row,
                {},
            )
    for row, result in found64.items():
        for name, expected in trained.items():
            apart = np.linalg.norm(result["parameters"][name] - expected) / np.linalg.norm(expected)
            assert apart < 1e-9, (row, name)


def test_bf16_with_all_levers_on_two_ranks_errs_no_more_than_without_on_one(cache: str) -> None:
    plain = dataclasses.replace(SETTINGS, dtype="bf16", batch_size=2)
    on = {name: values[1] for name, values in LEVERS.items()} | {"lm_head_fusion": True}
    levers = dataclasses.replace(plain, **on | {"batch_size": 1, "world_size": 2, "cp_size": 2, "emulate_nodes": 2})
    truth = dense_run(plain)
    alone = errors(run_on_ranks(1, parallel_runs, cache, {"": plain})[0][""], truth)
    shared = errors(run_on_ranks(2, parallel_runs, cache, {"": levers})[0][""], truth)
    assert max(alone.values()) < 0.1
    assert max(shared.values()) < 1.25 * max(alone.values())
