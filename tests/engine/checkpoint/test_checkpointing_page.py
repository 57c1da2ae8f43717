"""The tables of docs/checkpointing.md: shares are those the engine computes, times those of the published records."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from engine.attention.geometry.layout import LAYOUTS, SplitZigzag, tail_cut
from engine.attention.masks import kept_share, parse_mask, recompute_share
from engine.checkpoint.counts import inputs_at_once, layers_recomputed
from engine.settings import Checkpoint

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "checkpointing.md"
CURVE = ROOT / "results" / "published" / "cpu" / "checkpoint_tail" / "results.csv"
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


def test_the_measured_curve_is_that_of_the_published_records() -> None:
    with open(CURVE, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = {float(row["checkpoint.tail"]): float(row["step_seconds_median"]) for row in rows}
    assert sorted(steps) == [0, 0.25, 0.5, 0.75, 1]
    [row, *_] = rows
    # Output and LSE, fp32, of all layers.
    tokens_of_layers = int(row["seq_len"]) * int(row["model.layers"])
    held_mib = tokens_of_layers * 4 * (int(row["model.hidden"]) + int(row["model.heads"])) / (1 << 20)
    page = PAGE.read_text(encoding="utf-8")
    for tail, step in sorted(steps.items()):
        again = step - steps[1]
        cells = (held_mib * tail, step, again, again / (steps[0] - steps[1]), (1 - tail) ** 2)
        line = "| {:g} | {:.2f} | {:.3f} | {:.3f} | {:.2f} | {:.2f} |".format(tail, *cells)
        assert line in page, line
