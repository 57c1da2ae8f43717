"""Ulysses whose all-to-alls run beside the projections: the step of one process, in DeepSpeed's order."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from baselines.ulysses.attention import OverlappedUlysses
from engine.settings import Checkpoint, ModelShape, TrialSettings
from tests.engine.parity import dense_run, errors, parallel_runs, task_of
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=2, hidden=18, ffn=24, heads=4, kv_heads=2, head_dim=4, vocab=260, qk_norm=True)
SETTINGS = TrialSettings(
    task="train", method="ulysses", model=SHAPE, seq_len=32, cp_size=2, dtype="fp64", kernel="reference",
    overlap_projections=True, checkpoint=Checkpoint(every=0),
)  # fmt: skip


def test_loss_and_gradients_are_those_of_one_process(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("BURST_CACHE", str(tmp_path))
    cases = {
        "as many heads": SETTINGS,
        "fewer heads than ranks": replace(SETTINGS, model=replace(SHAPE, kv_heads=1)),
        "two micro-batches": replace(SETTINGS, gradient_accumulation=2),
    }
    found = run_on_ranks(2, parallel_runs, str(tmp_path), cases)[0]
    for name, settings in cases.items():
        truth = dense_run(replace(settings, method="burst", cp_size=1, world_size=1), torch.float64)
        assert max(errors(found[name], truth).values()) < 1e-10, name


def order_of_a_layer(cache: str, settings: TrialSettings) -> list[str]:
    """What the first layer of a forward and backward does, in the host's order."""
    os.environ["BURST_CACHE"] = cache
    _, task = task_of(settings)
    done: list[str] = []
    attention = task.model.blocks[0].attention
    for name in ("q", "k", "v", "output"):
        getattr(attention, name).register_forward_hook(lambda *_, name=name: done.append(name))
        getattr(attention, name).register_full_backward_hook(lambda *_, name=name: done.append(f"d{name}"))
    begin = OverlappedUlysses.begin

    def counted(self: OverlappedUlysses, rows: torch.Tensor) -> object:
        done.append("send")
        return begin(self, rows)

    with mock.patch.object(OverlappedUlysses, "begin", counted):
        task.gradients(0)
    return done


def test_each_tensor_is_sent_when_it_is_formed_and_all_gradients_before_the_first_is_used(tmp_path: Path) -> None:
    one_layer = replace(SETTINGS, model=replace(SHAPE, layers=1))
    forward = ["q", "send", "k", "send", "v", "send", "send", "output"]
    backward = ["doutput", "send", "send", "send", "send", "dv", "dk", "dq"]
    for done in run_on_ranks(2, order_of_a_layer, str(tmp_path), one_layer):
        assert done == forward + backward
