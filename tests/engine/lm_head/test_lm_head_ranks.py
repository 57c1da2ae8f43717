"""Training where one rank has no label to predict, as with a prompt that does not count."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine.burst import METHOD
from engine.data.sequences import Sequences
from engine.distributed import arrange
from engine.initialise import initialise
from engine.lm_head.loss import plain_loss_sum
from engine.lm_head.loss_kernel import IGNORE
from engine.models.decoder import Decoder
from engine.settings import TrialSettings
from engine.shape import ModelShape
from engine.tasks.train import TrainTask
from tests.engine.parity import whole_of
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=1, hidden=16, ffn=24, heads=2, kv_heads=2, head_dim=8, vocab=300)
SETTINGS = TrialSettings(
    task="train", method="burst", model=SHAPE, seq_len=32, cp_size=2, layout="contiguous", dtype="fp64", z_loss=1e-2
)


class Answers(Sequences):
    """Random sequences of which only the second half is to be predicted: nothing that the first of two ranks holds."""

    vocabulary = SHAPE.vocab

    def sequence(self, number: int, seq_len: int) -> Tensor:
        return torch.randint(SHAPE.vocab, (seq_len + 1,), generator=torch.Generator().manual_seed(number))

    def describe(self) -> dict[str, Any]:
        return {"origin": "random"}

    def batch(self, step: int, replica: int, dp_size: int, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
        tokens, labels = super().batch(step, replica, dp_size, batch_size, seq_len)
        labels = labels.clone()
        labels[:, : seq_len // 2] = IGNORE
        return tokens, labels


def gradients_of(settings: TrialSettings) -> tuple[float, dict[str, Any]]:
    """On each rank: the loss of all, and every parameter's whole gradient."""
    task = TrainTask(settings, METHOD, arrange(settings, torch.device("cpu")), sequences=Answers())
    total = task.gradients(0)
    assert (total.item() == 0) == (dist.get_rank() == 0)
    dist.all_reduce(total)
    return total.item(), {name: whole_of(p.grad).numpy() for name, p in task.model.named_parameters()}


@pytest.mark.parametrize("fused", [True, False])
def test_its_gradients_are_those_of_a_dense_run(fused) -> None:
    with torch.device("meta"):
        model = Decoder(SHAPE).double()
    initialise(model, SETTINGS.seed, torch.device("cpu"))
    model.head.loss_sum = partial(plain_loss_sum, z_loss=SETTINGS.z_loss)
    tokens, labels = Answers().batch(0, 0, 1, 1, SETTINGS.seq_len)
    loss = model(tokens, torch.arange(SETTINGS.seq_len), labels) / (SETTINGS.seq_len // 2)
    loss.backward()

    found, gradients = run_on_ranks(2, gradients_of, dataclasses.replace(SETTINGS, lm_head_fusion=fused))[0]
    assert found == pytest.approx(loss.item(), rel=1e-10)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad.numpy(), rtol=1e-7, atol=1e-12, err_msg=name)
