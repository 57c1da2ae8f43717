"""A matrix that is embedding and LM head at once: one sharded parameter, in steps and in saved states."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from engine.tasks.train import TrainTask
from tests.engine.parity import apart, dense_parameters, parallel_runs, task_of, whole_of
from tests.ranks import run_on_ranks

SHAPE = ModelShape(
    name="tied", layers=2, hidden=12, ffn=20, heads=4, kv_heads=2, head_dim=6, vocab=257, tied=True, qkv_bias=True
)
SETTINGS = TrialSettings(
    task="train", method="burst", model=SHAPE, seq_len=32, cp_size=2, dtype="fp64", checkpoint=Checkpoint(every=1)
)


def whole_parameters(task: TrainTask) -> dict[str, torch.Tensor]:
    return {name: whole_of(each).detach().clone() for name, each in task.model.named_parameters()}


def saved_and_restored(directory: str) -> tuple[bool, bool, bool, float]:
    """Whether the table is sharded; whether a new task has other parameters than a trained one, before and after it
    took the saved state; and how far apart the losses of their next steps are."""
    (_, trained), (_, fresh) = task_of(SETTINGS), task_of(SETTINGS)
    sharded = isinstance(trained.model.embedding.weight, DTensor) and trained.model.head.weight is None
    trained.step(0)
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    dcp.save({"model": model, "optimizer": optimizer["state"]}, checkpoint_id=directory)
    expected, before = whole_parameters(trained), whole_parameters(fresh)
    model, optimizer = get_state_dict(fresh.model, fresh.optimizer)
    dcp.load({"model": model, "optimizer": optimizer["state"]}, checkpoint_id=directory)
    set_state_dict(fresh.model, fresh.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    after = whole_parameters(fresh)
    assert expected.keys() == after.keys()
    differed = any(not torch.equal(expected[name], before[name]) for name in expected)
    differs = any(not torch.equal(expected[name], after[name]) for name in expected)
    return sharded, differed, differs, abs(trained.step(1).loss - fresh.step(1).loss)


def test_a_tied_model_is_saved_and_restored_by_its_shards(tmp_path: Path) -> None:
    found = run_on_ranks(2, saved_and_restored, str(tmp_path / "saved"))
    assert found == [(True, True, False, 0.0)] * 2


def test_clipping_and_the_optimizer_see_the_table_once() -> None:
    found = run_on_ranks(2, parallel_runs, {"tied": SETTINGS}, 3)[0]["tied"]["parameters"]
    expected = dense_parameters(SETTINGS, 3)
    assert found.keys() == expected.keys()
    assert {
        name: apart(found[name], expected[name]) for name in expected if not apart(found[name], expected[name]) < 1e-9
    } == {}
