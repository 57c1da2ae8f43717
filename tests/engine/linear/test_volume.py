"""The bytes that a linear layer is said to send are those that its ranks send."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import as_layout
from engine.linear.shard import Mix
from engine.linear.volume import moved_tokens, scan_messages, sent_bytes, state_bytes
from engine.models.linear import mixer_of
from engine.shape import ModelShape
from harness.spec.models import named_model
from tests.ranks import run_on_ranks

DELTA = ModelShape(
    name="hybrid", layers=2, hidden=6, ffn=8, heads=2, kv_heads=1, head_dim=4, vocab=9, layer_pattern="lf",
    linear="gated_delta_net", linear_heads=4, linear_key_heads=2, linear_key_dim=3, linear_value_dim=5,
)  # fmt: skip
SHAPES = {"delta": DELTA, "mamba": replace(DELTA, linear="mamba2", linear_conv=3)}
PAGE = Path(__file__).parents[3] / "docs/hybrids.md"
LAYOUTS = ("zigzag", "striped", "contiguous")
BATCH, TOKENS = 2, 12  # sequences, tokens of a rank


def measured() -> dict[str, tuple[int, int]]:
    """Bytes of this rank in forward, and in backward."""
    found = {}
    for layout in LAYOUTS:
        cp = ContextParallel(layout=layout)
        for name, shape in SHAPES.items():
            mixer = mixer_of(shape).double()
            for parameter in mixer.parameters():
                torch.nn.init.constant_(parameter, 0.1)
            x_BLE = torch.randn(BATCH, TOKENS, shape.hidden, dtype=torch.float64, requires_grad=True)
            cp.traffic.reset()
            mix = Mix(cp)
            branch_BLE = mix.leave(mix(mixer, mix.enter(x_BLE)))
            forward = cp.traffic.sent_bytes
            branch_BLE.sum().backward()
            found[f"{name} {layout}"] = forward, cp.traffic.sent_bytes - forward
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bytes_sent_are_those_computed_from_sizes(ranks: int) -> None:
    for rank, found in enumerate(run_on_ranks(ranks, measured)):
        for layout in LAYOUTS:
            for name, shape in SHAPES.items():
                sent = sent_bytes(shape, as_layout(layout), TOKENS * ranks, ranks, dtype="fp64", batch_size=BATCH)
                assert found[f"{name} {layout}"] == (sent[rank].sum(), sent[:, rank].sum()), (rank, name, layout)


def test_the_table_of_the_page_is_what_three_layers_send() -> None:
    model, layout, page = replace(named_model("hybrid_1b"), layers=4), as_layout("zigzag"), PAGE.read_text("utf-8")
    of_map, of_state = state_bytes(model, "bf16", 1)
    messages = [scan_messages(4, rank) for rank in range(4)]
    scan = [3 * (with_map * (of_map + of_state) + alone * of_state) for with_map, alone in messages]
    for name, tokens in (("64K", 1 << 16), ("512K", 1 << 19)):
        moved = moved_tokens(layout, tokens, 4)
        np.fill_diagonal(moved, 0)
        order = 2 * model.hidden * (moved + moved.T).sum(1)
        convolution = sent_bytes(model, layout, tokens, 4, dtype="bf16", batch_size=1).sum(1) - order - scan
        cells = f"{max(order) >> 20} MiB | {max(convolution) >> 10} KiB | {max(scan) >> 20} MiB"
        assert f"| {name} | {cells} |" in page
