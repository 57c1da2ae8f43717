"""Labels of a divided vocabulary: where they may be, and which are refused. Numbers: tests/baselines."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.distributed import arrange
from engine.settings import ModelShape, TrialSettings
from engine.tasks.train import TrainTask
from harness.spec.methods import method_named
from tests.engine.parity import task_of
from tests.ranks import run_on_ranks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
SHAPE = ModelShape(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=64, vocab=260)
SETTINGS = TrialSettings(task="train", method="megatron_tp", model=SHAPE, seq_len=512, tp_size=2, dtype="bf16")


def refusal_of(cache: str, settings: TrialSettings, label: int) -> str:
    os.environ["BURST_CACHE"] = cache
    _, task = task_of(settings)
    [batch] = task.batches(0)
    labels_BL = batch.labels_BL.clone()
    labels_BL[0, 3] = label
    with pytest.raises(ValueError, match="no word") as error:
        task.forward(replace(batch, labels_BL=labels_BL))
    return str(error.value)


@pytest.mark.parametrize("label", [260, -1])
def test_a_label_that_no_rank_holds_is_refused(label: int, tmp_path: Path) -> None:
    settings = replace(SETTINGS, dtype="fp32", seq_len=32)
    for reason in run_on_ranks(2, refusal_of, str(tmp_path), settings, label):
        assert reason.startswith(f"label {label} is no word of a vocabulary of 260; expected 0 to 259, or -100")


def loss_on_gpus(cache: str, settings: TrialSettings) -> float:
    os.environ["BURST_CACHE"] = cache
    device = torch.device("cuda", torch.cuda.current_device())
    task = TrainTask(settings, method_named(settings.method), arrange(settings, device))
    assert all(batch.labels_BL.device.type == "cpu" for batch in task.batches(0))
    return task.step(0).loss


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs: NCCL gathers no host memory")
@pytest.mark.parametrize("fused", [True, False])
def test_labels_in_host_memory_are_gathered_on_the_ranks_gpus(fused: bool, tmp_path: Path) -> None:
    settings = replace(SETTINGS, lm_head_fusion=fused)
    first, second = run_on_ranks(2, loss_on_gpus, str(tmp_path), settings, backend="nccl")
    assert first == second
    assert 3 < first < 8
