"""A few hundred trials of method `burst`, drawn once and for all: those of the pinned table of choices."""

from __future__ import annotations

import random
from dataclasses import replace

from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape

COUNT = 320
SHAPE = ModelShape(name="s", layers=4, hidden=512, ffn=512, heads=8, kv_heads=8, head_dim=64, vocab=64)
MASKS = ("causal", "full", "sliding_window:300", "sliding_window:5000", "documents:500,1548", "causal", "causal")
LINKS = (None, None, 1.0, 20.0)  # GiB/s between nodes, where they were measured


def trials() -> list[tuple[TrialSettings, float | None]]:
    """Each with the speed of the link between nodes that its ranks found."""
    return [_trial(random.Random(f"trial {number}")) for number in range(COUNT)]


def _trial(chance: random.Random) -> tuple[TrialSettings, float | None]:
    cp_size = chance.choice((1, 2, 4, 8, 8, 16))
    nodes = chance.choice([nodes for nodes in (1, 1, 2, 4) if nodes <= cp_size])
    heads, kv_heads = chance.choice(((8, 8), (32, 32), (32, 8), (64, 8), (16, 4), (6, 3)))
    by_hand = chance.random() < 0.6
    mask = chance.choice(MASKS)
    settings = TrialSettings(
        task=chance.choice(("train", "attention")), method="burst",
        model=replace(SHAPE, heads=heads, kv_heads=kv_heads, head_dim=chance.choice((64, 128))),
        seq_len=2048 if mask.startswith("documents") else chance.choice((2048, 1 << 14, 1 << 17, 1 << 19)),
        cp_size=cp_size, world_size=cp_size, dtype=chance.choice(("bf16", "bf16", "fp32")), mask=mask,
        batch_size=chance.choice((1, 1, 2)), emulate_nodes=nodes,
        layout=chance.choice(("auto", "zigzag", "zigzag", "contiguous", "striped")),
        grad_comm_dtype=chance.choice(("auto", "input", "input_across", "input_after_first")),
        checkpoint=chance.choice((Checkpoint(), Checkpoint(every=0), Checkpoint(tail=0.5))),
        deterministic=chance.random() < 0.1,
    )  # fmt: skip
    link = chance.choice(LINKS)
    if by_hand:
        settings = replace(
            settings,
            schedule=chance.choice(
                ("auto", "ring", "double_ring", "ulysses", "usp", "usp_transposed", "all_gather", "spiral")
            ),
            backward=chance.choice(("auto", "auto", "query", "key_value")),
            exchange=chance.choice(("auto", "auto", "relay", "direct", "copy_engine")),
        )
    return settings, link
