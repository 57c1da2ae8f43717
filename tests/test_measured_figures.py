"""The README's measured figures are those of the committed records, not typed in by hand."""

import csv
from pathlib import Path

from harness.lengths import format_length

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "published" / "h200x4" / "quickstart" / "results.csv"
METHODS = ("burst", "megatron_cp", "ulysses")


def test_the_readmes_table_is_made_of_published_records():
    shown = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    expected = table()
    assert len(expected) > 2
    assert [line for line in expected if line not in shown] == [], "\n".join(expected)


def table() -> list[str]:
    """A row per length and CP size at which all methods ran with FlashAttention-4."""
    with open(RESULTS, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "ok" and row["kernel"] == "fa4"]
    cells = {(int(row["seq_len"]), int(row["cp_size"]), row["method"]): row for row in rows}
    lines = ["| tokens | GPUs | burst | megatron_cp | ulysses | MFU of burst | MFU ceiling |"]
    for seq_len, cp_size in sorted({key[:2] for key in cells}):
        compared = [cells.get((seq_len, cp_size, method)) for method in METHODS]
        if None in compared:
            continue
        speeds = " | ".join(f"{float(row['tokens_per_gpu_per_second']):,.0f}" for row in compared if row)
        burst = cells[seq_len, cp_size, "burst"]
        mfu, ceiling = (f"{float(burst[column]):.1%}" for column in ("mfu", "mfu_ceiling"))
        lines.append(f"| {format_length(seq_len)} | {cp_size} | {speeds} | {mfu} | {ceiling} |")
    return lines
