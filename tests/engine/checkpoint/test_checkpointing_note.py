"""The tables of the note on checkpointing that no record holds: shares and counts are those the engine computes."""

from __future__ import annotations

import re
from pathlib import Path

from engine.attention.geometry.layout import LAYOUTS, SplitZigzag, tail_cut
from engine.attention.masks import kept_share, parse_mask, recompute_share
from engine.checkpoint.counts import inputs_at_once, layers_recomputed
from engine.settings import Checkpoint

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "notes" / "2026-11-23-checkpointing.md"
ROW = re.compile(r"^\| `([\w:]+)` \| ([\d.]+) \| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def test_the_table_of_shares_is_computed_not_remembered() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert {layout for _, _, layout, _, _ in rows} == {*LAYOUTS, "split_zigzag"}
    seq_len, cp_size = 1 << 16, 8
    for mask, tail, name, kept, again in rows:
        layout = LAYOUTS.get(name) or SplitZigzag(float(tail))
        cut = tail_cut(float(tail), seq_len, cp_size)
        found = (
            kept_share(layout, seq_len, cp_size, cut),
            recompute_share(parse_mask(mask), layout, seq_len, cp_size, cut),
        )
        assert tuple(f"{value:.2f}" for value in found) == (kept, again), (mask, tail, name)


def test_the_table_of_recomputed_layers_equals_the_counts() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert len(rows) > 4
    for row in rows:
        layers, *written = map(int, row)
        hold, bisect = (Checkpoint(every=layers, replay=replay) for replay in ("hold", "bisect"))
        found = [count(each, layers) for each in (hold, bisect) for count in (inputs_at_once, layers_recomputed)]
        assert found == written, layers
