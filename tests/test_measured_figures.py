"""Measured figures in the README and the documents are those of the committed records, not typed in by hand."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.base.lengths import format_length

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "results" / "published" / "h200x4"
METHODS = ("burst", "megatron_cp", "ulysses")
FORMS = ("own", "liger", "cce", "plain")
Row = dict[str, str]


def rows_of(experiment: str) -> list[Row]:
    with open(PUBLISHED / experiment / "results.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def measured(experiment: str) -> list[Row]:
    """The trials of a published folder that gave a number with FlashAttention-4."""
    return [row for row in rows_of(experiment) if row["status"] == "ok" and row["chosen_kernel"] == "fa4"]


def length(row: Row) -> str:
    return format_length(int(row["seq_len"]))


def methods_table() -> list[str]:
    """A row per length and CP size at which all methods ran."""
    cells = {(int(row["seq_len"]), int(row["cp_size"]), row["method"]): row for row in measured("quickstart")}
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
    """Models of seven and eight billion parameters on four GPUs, a row per length."""
    columns = ("model", "tokens", "step, s", "tokens per GPU per second", "MFU", "share of the ceiling", "GiB per GPU")
    lines = [f"| {' | '.join(columns)} | on the host |"]
    rows = (*measured("training_8b"), *measured("million_tokens"))
    for row in sorted(rows, key=lambda row: (row["model"] == "7b", int(row["seq_len"]))):
        step, speed, mfu, ceiling, memory = (
            float(row[column])
            for column in (
                "step_seconds_median", "tokens_per_gpu_per_second", "mfu", "mfu_ceiling", "peak_memory_gib"
            )
        )  # fmt: skip
        on_host = "layer inputs" if row["checkpoint.offload"] == "inputs" else "nothing"
        lines.append(
            f"| {row['model']} | {length(row)} | {step:.1f} | {speed:,.0f} | {mfu:.1%} | {mfu / ceiling:.1%} | "
            f"{memory:.0f} | {on_host} |"
        )
    return lines


def longest_table() -> list[str]:
    """The longest steps of the 8b model under a short window, a row per number of GPUs."""
    lines = ["| GPUs | tokens | GiB per GPU | GiB of the host per GPU | step, s |"]
    rows = [row for row in measured("longest_sequence") if row["checkpoint.offload"] == "inputs"]
    for row in sorted(rows, key=lambda row: int(row["cp_size"])):
        gpu, host, step = (float(row[name]) for name in ("peak_memory_gib", "peak_rss_gib", "step_seconds_median"))
        lines.append(f"| {row['cp_size']} | {int(row['seq_len']):,} | {gpu:.0f} | {host:.0f} | {step:.0f} |")
    return lines


def form_of(row: Row) -> str:
    return row["loss_kernel"] if row["lm_head_fusion"] == "true" else "plain"


def head_table() -> list[str]:
    """LM head and loss, a row per head and length of the timed trials, a column per form."""
    lines = [
        f"| vocabulary | tokens | {' | '.join(f'{form} ms' for form in FORMS)} | "
        f"{' | '.join(f'{form} GiB' for form in FORMS)} |"
    ]
    rows = [row for row in rows_of("lm_head") if int(row["seq_len"]) > 1024]
    cells = {(int(row["model.vocab"]), int(row["seq_len"]), form_of(row)): row for row in rows}
    for vocabulary, seq_len in sorted({key[:2] for key in cells}):
        found = [cells[vocabulary, seq_len, form] for form in FORMS]
        times = [f"{1e3 * float(row['step_seconds_median']):.1f}" if row["status"] == "ok" else "oom" for row in found]
        beyond = [
            f"{float(row['peak_memory_gib']) - float(row['extra_held_gib']):.2f}" if row["status"] == "ok" else "oom"
            for row in found
        ]
        lines.append(f"| {vocabulary} | {format_length(seq_len)} | {' | '.join(times)} | {' | '.join(beyond)} |")
    return lines


def head_error_table() -> list[str]:
    """Relative errors of the forms against float64, at 1K tokens."""
    lines = ["| vocabulary | form | loss | dhidden | dweight |"]
    rows = [row for row in rows_of("lm_head") if int(row["seq_len"]) == 1024]
    for row in sorted(rows, key=lambda row: (int(row["model.vocab"]), FORMS.index(form_of(row)))):
        errors = [f"{float(row[f'extra_error.{name}']):.1e}" for name in ("loss", "dhidden", "dweight")]
        lines.append(f"| {row['model.vocab']} | {form_of(row)} | {' | '.join(errors)} |")
    return lines


LEVERS = {
    "checkpoint.every": ("1", "`checkpoint.every: {}`"),
    "checkpoint.offload": ("none", "`checkpoint.offload: {}`"),
    "projection_tiles": ("1", "`projection_tiles: {}`"),
    "mlp_tiles": ("1", "`mlp_tiles: {}`"),
    "optimizer_offload": ("false", "`optimizer_offload: true`"),
}


def levers_table() -> list[str]:
    """None of the memory levers, each alone, all of them."""
    lines = ["| levers | GiB per GPU | GiB of the host per GPU | step, s |"]

    def pulled(row: Row) -> list[str]:
        return [form.format(row[name]) for name, (off, form) in LEVERS.items() if row[name] != off]

    order = list(LEVERS)
    for row in sorted(
        rows_of("memory_levers"),
        key=lambda row: (len(pulled(row)), [order.index(name) for name in order if row[name] != LEVERS[name][0]]),
    ):
        gpu, host, step = (float(row[name]) for name in ("peak_memory_gib", "peak_rss_gib", "step_seconds_median"))
        name = ("none", *pulled(row), "all five")[min(len(pulled(row)), 1) if len(pulled(row)) < 5 else -1]
        lines.append(f"| {name} | {gpu:.1f} | {host:.1f} | {step:.2f} |")
    return lines


def tail_table() -> list[str]:
    """Memory and time of the kept tail on GPUs, and what the traces have of attention computed again."""
    lines = ["| `checkpoint.tail` | GiB per GPU | step s | of it attention again, s | over that of tail 0 | (1 - f)² |"]
    rows = sorted(rows_of("checkpoint_tail"), key=lambda row: float(row["checkpoint.tail"]))
    whole = float(rows[0]["extra_profile.seconds.attention_recomputed"])
    for row in rows:
        tail, step = float(row["checkpoint.tail"]), float(row["step_seconds_median"])
        again = float(row["extra_profile.seconds.attention_recomputed"])
        lines.append(
            f"| {tail:g} | {float(row['peak_memory_gib']):.1f} | {step:.3f} | {again:.3f} | {again / whole:.2f} | "
            f"{(1 - tail) ** 2:.2f} |"
        )
    return lines


@pytest.mark.parametrize(
    ("page", "table"),
    [
        ("README.md", methods_table),
        ("README.md", long_steps_table),
        ("README.md", longest_table),
        ("docs/lm-head.md", head_table),
        ("docs/lm-head.md", head_error_table),
        ("docs/memory.md", levers_table),
        ("docs/checkpointing.md", tail_table),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_table_of_measured_figures_is_made_of_published_records(page: str, table: Callable[[], list[str]]) -> None:
    shown = [line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    expected = table()
    assert len(expected) > 2
    assert [line for line in expected if line not in shown] == [], "\n".join(expected)
