"""What a layer's backward holds at its peak, in hidden states of all tokens: the range of docs/memory.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention import op, plan
from engine.attention.context import ContextParallel
from engine.attention.kernels import BackwardInputs, Gradients
from engine.attention.kernels.cpu import CpuKernel
from engine.burst import METHOD
from engine.checkpoint.planning.memory import MemoryModel
from engine.checkpoint.planning.memory_settings import memory_settings_of
from engine.models.decoder import Decoder
from engine.parallelize import set_layers
from engine.settings import Checkpoint, ModelShape, TrialSettings
from tests.engine.live_bytes import LiveBytes
from tests.slow import slow

TOKENS, TILES = 1024, 32


@dataclass(frozen=True)
class Allocating(CpuKernel):
    """Attention that makes the tensors a GPU kernel makes, and computes nothing."""

    writes_input_dtype = True
    takes_delta: bool = True
    takes_output = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Any, scale: float) -> tuple[Tensor, Tensor]:
        batch, tokens, heads, _ = q.shape
        return q.new_zeros(batch, tokens, heads, v.shape[-1]), torch.zeros(batch, heads, tokens)

    def backward(self, given: BackwardInputs, band: Any, scale: float, deterministic: bool) -> Gradients:
        dq, dk, dv = (torch.zeros_like(t) for t in (given.q_BLND, given.k_BMKD, given.v_BMKD))
        return dq, dk, dv


class FusedNorm(torch.autograd.Function):
    """RMSNorm as GPUs have it: no intermediates. Values do not matter here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, dnormed: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(weight)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "choose_kernel", lambda *_, **__: Allocating())
    monkeypatch.setattr(op, "row_dot", lambda a, b: torch.zeros(a.shape[0], a.shape[2], a.shape[1]))
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight=None, eps=None: FusedNorm.apply(x, weight))


def trial(checkpoint: Checkpoint, projection_tiles: int = TILES, **changes: Any) -> TrialSettings:
    sizes = {"hidden": 64, "ffn": 8, "heads": 4, "kv_heads": 4, "head_dim": 16, "vocab": 32}
    shape = ModelShape(name="s", layers=max(3, checkpoint.every + 1), **sizes | changes)
    return TrialSettings(
        task="train", method="burst", model=shape, seq_len=TOKENS, dtype="bf16", checkpoint=checkpoint,
        mlp_tiles=TILES, projection_tiles=projection_tiles,
    )  # fmt: skip


def peak(kv_heads: int, checkpoint: Checkpoint, projection_tiles: int = TILES) -> float:
    return peak_of(trial(checkpoint, projection_tiles, kv_heads=kv_heads))


def peak_of(settings: TrialSettings) -> float:
    """Bytes that live at once in the backward of a few layers, over those of one hidden state of all tokens."""
    shape = settings.model
    model = Decoder(shape).bfloat16()
    keeper = set_layers(model, settings, METHOD.attention(ContextParallel.single(), settings))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = torch.randint(shape.vocab, (1, TOKENS))
    with LiveBytes() as live:
        x_BLE = model.embedding(tokens)
        rotary = torch.ones(TOKENS, shape.rotated_dim // 2), torch.zeros(TOKENS, shape.rotated_dim // 2)
        for block in model.blocks:
            x_BLE = block(x_BLE, rotary)
        gradient = torch.zeros_like(x_BLE)
        live.peak = live.now
        x_BLE.backward(gradient)
    del keeper
    state = TOKENS * shape.hidden * 2
    return (live.peak - rotary[0].nbytes * 2) / state - 2  # this function holds the last output and its gradient


@pytest.mark.parametrize(("kv_heads", "states", "every"), [(2, 7.0, 1), *slow((1, 6.5, 8), (4, 9.0, 4))])
def test_a_layers_backward_holds_few_hidden_states(kv_heads: int, states: float, every: int) -> None:
    bisected = Checkpoint(every=every, tail=0, offload="inputs", replay="bisect")
    found = peak(kv_heads, bisected)
    assert found == pytest.approx(states, abs=0.5)
    assert peak(kv_heads, bisected, projection_tiles=1) > found + 0.9


def test_a_held_recomputation_holds_its_inputs_and_outputs_besides() -> None:
    held, bisected = (Checkpoint(every=4, tail=0, offload="inputs", replay=replay) for replay in ("hold", "bisect"))
    assert peak(1, held) > peak(1, bisected) + 4


LATENT = {"head_dim": 24, "kv_latent": 24, "rope_dim": 8, "value_dim": 16}


def test_a_layer_of_a_latent_holds_what_the_planner_counts() -> None:
    """Keys and values of all heads, and their gradients, are there once, while they are used."""
    settings = trial(Checkpoint(every=1, tail=0, offload="inputs", replay="bisect"), **LATENT)
    model = MemoryModel(settings)
    counted = model._layer(memory_settings_of(settings), 0.0) - model._attention_sums  # a kernel's own, not made here
    assert peak_of(settings) == pytest.approx(counted / (TOKENS * settings.model.hidden * 2), abs=0.5)
