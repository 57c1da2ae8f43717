"""The tables of docs/baselines.md are those of the pins, the settings table and the published fidelity results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from baselines.fidelity.cases import SYSTEMS
from engine.settings import SettingsFrom
from harness.report.results import METHOD_ORDER, cell
from harness.spec.table import method_settings_of, settings_table
from tests.baselines.test_fidelity import published_rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "baselines.md").read_text(encoding="utf-8")
PINS = sorted((ROOT / "baselines").glob("*/pin.yaml"))
SHOWN = (
    "grad_comm_dtype", "lm_head_fusion", "checkpoint.every", "checkpoint.tail", "mlp_tiles", "optimizer_offload",
)  # fmt: skip
# One value under both names for every method that has it, given by the method's name, or said of `burst` in a sentence.
IN_WORDS = {"sharding", "schedule", "backward", "layout", "exchange", "checkpoint.plan"}
VARIANTS: tuple[SettingsFrom, ...] = ("as_published", "tuned")


def table(*lines: tuple[str, ...]) -> str:
    head, *rows = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ("---",) * len(head), *rows))


def settings_shown() -> str:
    lines = [("method", "`settings`", *(f"`{name}`" for name in SHOWN))]
    for method in (name for name in METHOD_ORDER if name in settings_table() and not name.startswith("flash_")):
        for variant in VARIANTS:
            entry = method_settings_of(method, variant)
            assert entry is not None
            values = [cell(entry.choices[name].value) if name in entry.choices else "-" for name in SHOWN]
            lines.append((f"`{method}`", f"`{variant}`", *values))
    return table(*lines)


def fidelity_shown() -> str:
    head = (
        "upstream system", "native baseline", "error, upstream", "error, native", "bytes, upstream", "bytes, native",
        "bytes, native ÷ upstream",
    )  # fmt: skip
    lines = []
    for name in SYSTEMS:
        for row in published_rows(name).values():
            if row.native and row.dtype == "bf16" and row.ranks == 4 and row.verdict == "equal":
                assert None not in (row.worst, row.native_worst, row.sent_bytes, row.native_sent_bytes)
                ratio = f"{row.native_sent_bytes / row.sent_bytes:.2f}"
                sent = (f"{row.sent_bytes:,}", f"{row.native_sent_bytes:,}")
                errors = (f"{row.worst:.1e}", f"{row.native_worst:.1e}")
                lines.append((f"{row.system}, {row.form}", f"`{row.native}`", *errors, *sent, ratio))
    return table(head, *lines)


def test_the_page_shows_the_settings_of_native_baselines_as_the_table_has_them() -> None:
    assert settings_shown() in PAGE, settings_shown()


def test_no_entry_of_a_native_baseline_names_a_setting_that_the_page_leaves_out() -> None:
    named = {
        name
        for method in settings_table()
        if not method.endswith("_upstream")
        for variant in VARIANTS
        if (entry := method_settings_of(method, variant))
        for name in entry.choices
    }
    assert named <= {*SHOWN, *IN_WORDS}


def test_the_page_says_what_burst_takes_as_published() -> None:
    entry = method_settings_of("burst", "as_published")
    assert entry is not None
    for name in ("schedule", "backward", "layout", "exchange"):
        assert f"`{name}: {entry.choices[name].value}`" in PAGE


def test_the_page_shows_the_errors_and_bytes_of_the_published_fidelity_results() -> None:
    assert fidelity_shown() in PAGE, fidelity_shown()


@pytest.mark.parametrize("pin", PINS, ids=lambda pin: pin.parent.name)
def test_every_system_that_can_be_installed_has_a_row_with_its_version_devices_and_licence(pin: Path) -> None:
    system = yaml.safe_load(pin.read_text(encoding="utf-8"))
    found = re.search(rf"^\| `{pin.parent.name}` \|(.*)\|$", PAGE, re.MULTILINE)
    assert found, f"docs/baselines.md has no row for {pin.parent.name}; add one to the table of systems"
    _, _, version, devices, licence = (cell.strip() for cell in found[1].split("|"))
    packages = system.get("current", {}).get("packages", {})
    own = [name.partition("==")[2] for name in packages]
    assert not own or any(one in version for one in own[:1]), f"the pin has {own[:1]}"
    assert ("paper" in system) == ("paper's copy" in version)
    flavours = [system[name] for name in ("current", "paper") if name in system]
    assert ("CPU" in devices) == any("cpu" in flavour.get("devices", []) for flavour in flavours)
    assert licence.split()[0].strip(",;") == system["licence"].split()[0].strip(",;")
