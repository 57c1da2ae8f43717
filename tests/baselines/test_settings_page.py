"""docs/baselines.md shows the table of settings as it is."""

from __future__ import annotations

from pathlib import Path

from engine.settings import SettingsFrom
from harness.report.results import METHOD_ORDER, cell
from harness.spec.table import entry_of, settings_table

PAGE = Path(__file__).parents[2] / "docs" / "baselines.md"
SHOWN = (
    "schedule", "backward", "layout", "grad_comm_dtype", "lm_head_fusion", "checkpoint.every", "checkpoint.tail",
    "mlp_tiles", "optimizer_offload", "sharding",
)  # fmt: skip
VARIANTS: tuple[SettingsFrom, ...] = ("as_published", "tuned")


def shown_table() -> str:
    natives = [name for name in METHOD_ORDER if name in settings_table()]
    lines = [("method", "`settings`", *(f"`{name}`" for name in SHOWN)), ("---",) * (len(SHOWN) + 2)]
    for method in natives:
        for variant in VARIANTS:
            entry = entry_of(method, variant)
            assert entry is not None
            values = [cell(entry.choices[name].value) if name in entry.choices else "-" for name in SHOWN]
            lines.append((f"`{method}`", f"`{variant}`", *values))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_the_page_shows_the_entries_of_native_forms_as_the_table_has_them() -> None:
    assert shown_table() in PAGE.read_text(encoding="utf-8"), shown_table()


def test_no_entry_of_a_native_form_names_a_setting_that_the_page_leaves_out() -> None:
    named = {
        name
        for method in settings_table()
        if not method.endswith("_upstream")
        for variant in VARIANTS
        if (entry := entry_of(method, variant))
        for name in entry.choices
    }
    assert named <= {*SHOWN, "exchange", "checkpoint.plan"}  # which `burst` alone chooses
