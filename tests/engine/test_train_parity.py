"""Loss, norm and every parameter's gradient equal a one-process dense run, whatever the ranks and the levers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from engine.settings import Checkpoint, ModelShape, TrialSettings
from tests.engine.parity import dense_run, errors, parallel_runs
from tests.ranks import run_on_ranks

# Odd sizes on purpose: no dimension divides by 4, so that FSDP2's last ranks hold short shards or none.
SHAPE = ModelShape(name="odd", layers=2, hidden=18, ffn=30, heads=6, kv_heads=2, head_dim=6, vocab=257)
SETTINGS = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=48, batch_size=2, dtype="fp32")
LEVERS = {
    "keep, fused": {"checkpoint": Checkpoint(every=0), "lm_head_fusion": True},
    "tail 1, fused": {"checkpoint": Checkpoint(every=1, tail=1.0), "lm_head_fusion": True},
    "tail 0, fused": {"checkpoint": Checkpoint(every=1, tail=0.0), "lm_head_fusion": True},
    "keep, plain": {"checkpoint": Checkpoint(every=0), "lm_head_fusion": False},
    "tail 1, plain": {"checkpoint": Checkpoint(every=1, tail=1.0), "lm_head_fusion": False},
    "contiguous, query": {"layout": "contiguous", "backward": "query"},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A cache directory of this test's own."""
    monkeypatch.setenv("BURST_CACHE", str(tmp_path))
    return str(tmp_path)


@pytest.mark.parametrize(("world_size", "cp_size"), [(1, 1), (2, 2), (4, 4), (4, 2), (2, 1)])
def test_loss_and_gradients_equal_a_dense_run(world_size: int, cp_size: int, cache: str) -> None:
    layouts = {"world_size": world_size, "cp_size": cp_size}
    cases = {name: dataclasses.replace(SETTINGS, **layouts, **levers) for name, levers in LEVERS.items()}
    truth = dense_run(next(iter(cases.values())))
    per_rank = run_on_ranks(world_size, parallel_runs, cache, cases)
    for name in cases:
        assert {what: error for what, error in errors(per_rank[0][name], truth).items() if not error < 1e-5} == {}
        assert {(rank[name]["loss"], rank[name]["grad_norm"]) for rank in per_rank} == {
            (per_rank[0][name]["loss"], per_rank[0][name]["grad_norm"])
        }


def test_bf16_is_as_close_to_fp32_on_two_ranks_as_on_one(cache: str) -> None:
    alone = dataclasses.replace(SETTINGS, dtype="bf16")
    shared = dataclasses.replace(SETTINGS, dtype="bf16", world_size=2, cp_size=2)
    truth = dense_run(alone)
    on_one = errors(run_on_ranks(1, parallel_runs, cache, {"bf16": alone})[0]["bf16"], truth)
    on_two = errors(run_on_ranks(2, parallel_runs, cache, {"bf16": shared})[0]["bf16"], truth)
    assert max(on_one.values()) < 0.1
    assert max(on_two.values()) < 1.25 * max(on_one.values())
