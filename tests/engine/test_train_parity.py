"""Loss, norm and every parameter's gradient equal a one-process dense run, whatever the ranks and the levers."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from engine.burst import METHOD
from engine.data import open_tokens
from engine.distributed import arrange
from engine.initialise import initialise
from engine.model import Decoder
from engine.settings import Checkpoint, ModelShape, TrialSettings
from engine.train import TrainTask, clip_gradients
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
Result = dict[str, Any]


def dense_run(settings: TrialSettings, dtype: torch.dtype = torch.float32) -> Result:
    """The same step in one process: no FSDP, no checkpointing, no fusion, dense attention."""
    with torch.device("meta"):
        model = Decoder(settings.model)
    initialise(model, settings.seed, torch.device("cpu"))
    model.to(dtype)
    store = open_tokens(settings.data)
    batches = [
        store.batch(1, replica, settings.dp_size, settings.batch_size, settings.seq_len)
        for replica in range(settings.dp_size)
    ]
    tokens, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = model(tokens, torch.arange(settings.seq_len), labels) / labels.numel()
    loss.backward()
    gradients = {name: parameter.grad.double().numpy() for name, parameter in model.named_parameters()}
    norm = float(np.sqrt(sum((gradient**2).sum() for gradient in gradients.values())))
    return {"loss": loss.item(), "grad_norm": norm, "gradients": gradients}


def parallel_runs(cache: str, cases: dict[str, TrialSettings]) -> dict[str, Result]:
    """Loss, norm and gathered gradients of each case on these ranks; gradients from rank 0 alone."""
    os.environ["BURST_CACHE"] = cache
    results = {}
    for name, settings in cases.items():
        world = arrange(settings, torch.device("cpu"))
        task = TrainTask(settings, METHOD, world)
        loss = task.forward(task.batch(1))
        loss.backward()
        total = loss.detach()
        torch.distributed.all_reduce(total)
        gradients = {}
        for parameter_name, parameter in task.model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            gradients[parameter_name] = parameter.grad.full_tensor().double().numpy()
        results[name] = {
            "loss": total.item(),
            "gradients": gradients if world.rank == 0 else {},
            "grad_norm": clip_gradients(task.model).item(),
        }
    return results


def errors(found: Result, truth: Result) -> dict[str, float]:
    """Relative error of loss, norm and each gradient."""
    compared = {name: abs(found[name] / truth[name] - 1) for name in ("loss", "grad_norm")}
    for name, expected in truth["gradients"].items():
        compared[name] = float(np.linalg.norm(found["gradients"][name] - expected) / np.linalg.norm(expected))
    return compared


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
