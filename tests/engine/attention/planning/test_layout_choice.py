"""`layout: auto` takes the most even layout for the mask, and the simplest of those that are as even."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import engine
from engine.attention.geometry.layout import LAYOUTS
from engine.attention.masks import BlockSparse, Causal, Documents, Full, LocalGlobal, SlidingWindow, imbalance
from engine.attention.resolve import AS_GOOD, PREFERENCE, choose_layout
from engine.burst import METHOD
from engine.settings import TrialSettings
from engine.shape import ModelShape

CHANCE = random.Random(0)
LONG_FIRST = Documents((3 << 16, *[4096] * 16))
SHAPE = ModelShape(name="s", layers=1, hidden=8, ffn=8, heads=2, kv_heads=2, head_dim=4, vocab=8)


@pytest.mark.parametrize(
    ("mask", "seq_len", "cp_size", "layout"),
    [
        (Full(), 4096, 8, "contiguous"),
        (Causal(), 4096, 8, "zigzag"),
        (Causal(), 4096, 1, "contiguous"),
        (SlidingWindow(4096), 1 << 18, 4, "contiguous"),  # needs chunks of one neighbour, and rank 0 lacks little
        (SlidingWindow(1 << 14), 1 << 18, 4, "contiguous"),
        (SlidingWindow(1 << 17), 1 << 18, 4, "striped"),  # one rank would wait for the others a third of the time
        (Documents((512,) * 8), 4096, 8, "contiguous"),  # each rank its own document
        (Documents((1 << 17,) * 2), 1 << 18, 8, "balanced"),  # zigzag is as even and sends more
        (Documents((1 << 16, 3 << 16)), 1 << 18, 8, "balanced"),  # zigzag balances the sequence, not the documents
        (Documents((60000, 40000), repeat=True), 1 << 18, 8, "balanced"),
        (Documents((1024, 3072)), 4096, 8, "contiguous"),  # a step takes the host longer than the GPU
        (Documents((4096,)), 4096, 8, "zigzag"),
        (BlockSparse(LocalGlobal(1), 64), 1 << 16, 4, "contiguous"),
        (BlockSparse([[True] * 64] * 64, 64, causal=True), 4096, 8, "zigzag"),
        (Causal(), 12, 4, "striped"),  # 12 tokens are not 8 chunks
        (Causal(), 4097, 8, "zigzag"),  # no layout can split it: refused as zigzag
    ],
    ids=str,
)
def test_the_layout_fits_the_mask(mask, seq_len, cp_size, layout) -> None:
    assert choose_layout(mask, seq_len, cp_size).name == layout
    assert engine.choose_layout is choose_layout


@pytest.mark.parametrize("mask", [LONG_FIRST, *[
    BlockSparse([[CHANCE.random() < row / 32 for _ in range(32)] for row in range(32)], 128) for _ in range(4)
]], ids=lambda mask: type(mask).__name__)  # fmt: skip
def test_no_other_layout_is_much_more_even(mask) -> None:
    tokens = mask.tokens if isinstance(mask, Documents) else 4096
    shares = {layout.name: imbalance(mask, layout, tokens, 4) for layout in PREFERENCE}
    assert imbalance(mask, choose_layout(mask, tokens, 4), tokens, 4) <= min(shares.values()) * AS_GOOD
    assert max(shares.values()) > 1.1


def test_a_method_refuses_a_mask_of_another_length_before_ranks_start() -> None:
    settings = TrialSettings(task="attention", method="burst", model=SHAPE, seq_len=256, mask="documents:64,128")
    assert "2 documents hold 192 tokens and the sequence has 256" in (METHOD.refuse(settings) or "")


def test_a_schedule_with_an_all_to_all_gets_no_striped_layout() -> None:
    settings = TrialSettings(
        task="train", method="burst", model=SHAPE, seq_len=1 << 18, cp_size=8, mask="documents:64k,192k"
    )
    assert METHOD.layout(settings).name == "balanced"
    settings = replace(settings, mask="sliding_window:128k")
    assert METHOD.layout(settings).name == "striped"
    assert METHOD.layout(replace(settings, schedule="ulysses")).name != "striped"


def test_documents_that_a_batch_brings_are_dealt_where_several_ranks_share_them() -> None:
    settings = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=4096, cp_size=8, mask="documents")
    assert METHOD.layout(settings).name == "balanced"
    assert METHOD.layout(replace(settings, cp_size=1)).name == "contiguous"
    assert METHOD.layout(replace(settings, layout="zigzag")) == "zigzag"


def test_a_layout_that_leaves_too_many_pieces_is_passed_over() -> None:
    chequered = [[48 <= row < 96 and (row + column) % 2 == 0 for column in range(192)] for row in range(192)]
    mask = BlockSparse(chequered, 4)
    assert imbalance(mask, LAYOUTS["striped"], 768, 4) == 1.0
    assert imbalance(mask, LAYOUTS["zigzag"], 768, 4) == 2.0
    assert choose_layout(mask, 768, 4).name == "zigzag"


@pytest.mark.parametrize("mask", [Causal(), Documents((3,)), Documents((1, 2)), BlockSparse([[True]], 3)], ids=str)
def test_fewer_tokens_than_ranks_still_have_a_layout_to_be_refused_for(mask) -> None:
    assert choose_layout(mask, 3, 8) in PREFERENCE
