"""The README's measured figures are those of the committed records, not typed in by hand."""

import csv
from pathlib import Path

from harness.lengths import format_length

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "results" / "published" / "h200x4"
METHODS = ("burst", "megatron_cp", "ulysses")


def test_the_readmes_tables_are_made_of_published_records():
    shown = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    for expected in (methods_table(), long_steps_table()):
        assert len(expected) > 2
        assert [line for line in expected if line not in shown] == [], "\n".join(expected)


def rows_of(experiment: str) -> list[dict[str, str]]:
    """The trials of a published folder that gave a number with FlashAttention-4."""
    with open(PUBLISHED / experiment / "results.csv", encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["status"] == "ok" and row["chosen_kernel"] == "fa4"]


def methods_table() -> list[str]:
    """A row per length and CP size at which all methods ran."""
    cells = {(int(row["seq_len"]), int(row["cp_size"]), row["method"]): row for row in rows_of("quickstart")}
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


def long_steps_table() -> list[str]:
    """The 8b model on four GPUs, a row per length."""
    lines = [
        "| tokens | step, s | tokens per GPU per second | MFU | share of the ceiling | GiB per GPU | on the host |"
    ]
    for row in sorted((*rows_of("training_8b"), *rows_of("million_tokens")), key=lambda row: int(row["seq_len"])):
        step, speed, mfu, ceiling, memory = (
            float(row[column])
            for column in (
                "step_seconds_median", "tokens_per_gpu_per_second", "mfu", "mfu_ceiling", "peak_memory_gib"
            )
        )  # fmt: skip
        on_host = "layer inputs" if row["checkpoint.offload"] == "inputs" else "nothing"
        lines.append(
            f"| {format_length(int(row['seq_len']))} | {step:.1f} | {speed:,.0f} | {mfu:.1%} | {mfu / ceiling:.1%} | "
            f"{memory:.0f} | {on_host} |"
        )
    return lines
