"""The layouts' shares on docs/checkpointing.md are those the engine computes."""

from __future__ import annotations

import re
from pathlib import Path

from engine.attention.layout import LAYOUTS, SplitZigzag, tail_cut
from engine.attention.masks import kept_share, parse_mask, recompute_share

PAGE = Path(__file__).parents[2] / "docs" / "checkpointing.md"
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
