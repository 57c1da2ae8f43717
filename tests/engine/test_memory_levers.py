"""What each setting that saves memory saves, counted in bytes without an allocator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.attention.context import ContextParallel
from engine.burst import METHOD
from engine.lm_head.loss import fused_loss_sum
from engine.models.decoder import Decoder
from engine.optimizer import adamw
from engine.parallelize import set_layers
from engine.settings import AdamWSettings, Checkpoint, TrialSettings
from engine.shape import ModelShape
from tests.engine.live_bytes import LiveBytes

MIB = 1 << 20
# Wide MLP, many layers, small vocabulary: each setting has something to save.
SHAPE = ModelShape(name="counted", layers=12, hidden=64, ffn=256, heads=4, kv_heads=4, head_dim=16, vocab=256)
TOKENS = 1024
PLAIN = "the defaults"
# MiB beyond the parameters: at the peak of forward and backward, optimizer states included, and between steps.
EXPECTED: dict[str, tuple[float, float]] = {
    "every 0": (54.58, 6.26),
    "every 0, mlp 0, mlp_tiles 8": (26.81, 6.26),
    PLAIN: (20.90, 6.26),
    "every 4": (19.40, 6.26),
    "offload all": (17.98, 6.26),
    "mlp_tiles 8": (15.61, 6.26),
    "projection_tiles 8": (20.39, 6.26),
    "optimizer_offload": (14.63, 0.00),
    "all of the last five": (6.69, 0.00),
}
ROWS: dict[str, dict[str, Any]] = {
    "every 0": {"checkpoint": Checkpoint(every=0)},
    "every 0, mlp 0, mlp_tiles 8": {"checkpoint": Checkpoint(every=0, mlp=0.0), "mlp_tiles": 8},
    PLAIN: {},
    "every 4": {"checkpoint": Checkpoint(every=4)},
    "offload all": {"checkpoint": Checkpoint(offload="all")},
    "mlp_tiles 8": {"mlp_tiles": 8},
    "projection_tiles 8": {"projection_tiles": 8},
    "optimizer_offload": {"optimizer_offload": True},
    "all of the last five": {
        "checkpoint": Checkpoint(every=4, offload="all"),
        "projection_tiles": 8,
        "mlp_tiles": 8,
        "optimizer_offload": True,
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of small operations would wait for each other longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def counted(row: str) -> tuple[float, float]:
    """MiB of gradients, optimizer states and activations: at the peak of forward and backward, and between steps."""
    settings = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=TOKENS, dtype="fp32", **ROWS[row])
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    torch.nn.init.normal_(model.head.weight)
    attend = METHOD.attention(ContextParallel.single(), settings)
    set_layers(model, settings, attend)
    model.head.loss_sum = fused_loss_sum
    optimizer = adamw(model, 1e-3, AdamWSettings(), offload=float(settings.optimizer_offload))
    tokens = torch.randint(SHAPE.vocab, (1, TOKENS + 1))
    with LiveBytes() as live:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # states are there from now on
        optimizer.zero_grad()
        held = live.peak = live.now
        (model(tokens[:, :-1], torch.arange(TOKENS), tokens[:, 1:]) / TOKENS).backward()
        return live.peak / MIB, held / MIB


def test_each_memory_setting_saves_its_bytes() -> None:
    bytes_of = {row: counted(row) for row in ROWS}
    for row, (peak, held) in EXPECTED.items():
        # Versions of torch differ a little in what they keep.
        assert bytes_of[row] == (pytest.approx(peak, rel=0.05), pytest.approx(held, rel=0.05, abs=0.01)), row

    peaks = [peak for peak, _ in bytes_of.values()]
    keep, keep_tiled, default, *alone, together = peaks
    assert all(peak < default < keep for peak in alone)
    assert together < min(alone)
    # Kept of each layer's MLP: up and gate, their product is formed again. In tiles, of one run and one layer.
    assert keep - keep_tiled > (SHAPE.layers - 1) * 2 * (4 * TOKENS * SHAPE.ffn / MIB)

    states = 2 * 4 * SHAPE.parameters / MIB  # two moments in fp32 are all that is held between steps
    assert {round(held / states, 2) for _, held in bytes_of.values()} == {0.0, 1.0}
