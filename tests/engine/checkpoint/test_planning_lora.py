"""The memory model of a step with adapters beside the bytes that live at once, with the tensors of GPU kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.attention.context import ContextParallel
from engine.burst import METHOD
from engine.checkpoint.planning.memory import MemoryModel
from engine.checkpoint.planning.memory_settings import memory_settings_of
from engine.lm_head.loss import fused_loss_sum
from engine.lora import MODULES, Lora
from engine.models import decoder
from engine.models.decoder import Decoder
from engine.ops import elementwise
from engine.optimizer import adamw
from engine.parallelize import keep_parameters, set_layers
from engine.settings import AdamWSettings, Checkpoint, TrialSettings
from engine.shape import ModelShape
from tests.engine.live_bytes import LiveBytes, SavesInputs
from tests.engine.test_layer_peak import as_on_a_gpu
from tests.slow import slow

__all__ = ["as_on_a_gpu"]  # a fixture
TOKENS = 1024
SHAPE = ModelShape(name="wide", layers=4, hidden=64, ffn=224, heads=4, kv_heads=1, head_dim=16, vocab=64)
ALL = Lora(rank=4, alpha=8.0, targets=tuple(MODULES))
SOME = Lora(rank=16, alpha=8.0, targets=("q", "v"))
CASES: dict[str, tuple[Lora, dict[str, Any]]] = {
    "recomputed": (ALL, {}),
    "kept": (ALL, {"checkpoint": Checkpoint(every=0)}),
    "few matrices, kept": (SOME, {"checkpoint": Checkpoint(every=0)}),
    "kept but the MLP": (ALL, {"checkpoint": Checkpoint(every=0, mlp=0.0), "mlp_tiles": 8}),
    "on the host": (ALL, {"checkpoint": Checkpoint(offload="all")}),
    "in tiles": (ALL, {"mlp_tiles": 8, "projection_tiles": 8}),
}


@pytest.mark.parametrize("case", [*list(CASES)[:3], *slow(*list(CASES)[3:])])
def test_the_counted_bytes_are_those_of_the_memory_model(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "swiglu", SavesInputs.apply)
    monkeypatch.setattr(elementwise, "_rotated", lambda x, cos, sin, out: out.zero_())
    lora, levers = CASES[case]
    settings = TrialSettings(
        task="train", method="burst", model=SHAPE, seq_len=TOKENS, dtype="bf16", lora=lora, **levers
    )  # fmt: skip
    model = Decoder(SHAPE)
    model.adapt(lora, torch.bfloat16)
    set_layers(model, settings, METHOD.attention(ContextParallel.single(), settings))
    model.head.loss_sum = fused_loss_sum
    keep_parameters(model, settings)
    optimizer = adamw(model, 1e-3, AdamWSettings())
    tokens = torch.randint(SHAPE.vocab, (1, TOKENS + 1))
    with LiveBytes() as live:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()  # states are there from now on
        optimizer.zero_grad()
        live.peak = live.now
        (model(tokens[:, :-1], torch.arange(TOKENS), tokens[:, 1:]) / TOKENS).backward()
    found = live.peak + sum(parameter.nbytes for parameter in model.parameters())
    assert MemoryModel(settings).of(memory_settings_of(settings)).allocated == pytest.approx(found, rel=0.05)
