"""What `settings: as_published` and `settings: tuned` mean for a method: the entries of baselines/settings.yaml.

An entry names ordinary settings with their values. It fills those that an experiment does not give itself. What it
cannot say with a setting stands in its notes, which reports print.
"""

from __future__ import annotations

import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import baselines
from cluster.files.reader import Node, check_keys, convert, read_yaml
from engine.settings import SettingsFrom
from harness.base.errors import UsageError, nearest
from harness.spec.setting import SETTINGS, read_setting

TABLE_FILE = Path(next(iter(baselines.__path__))) / "settings.yaml"
EQUAL: SettingsFrom = "equal"  # every method with the experiment's values and the defaults
VARIANTS: tuple[SettingsFrom, ...] = typing.get_args(SettingsFrom)

# What is computed and on how many ranks is the experiment's alone. All other settings say how a method computes it.
EXPERIMENTS_OWN = frozenset(
    {
        "task", "method", "settings", "model", "seq_len", "cp_size", "tp_size", "world_size", "batch_size", "dtype",
        "linear_dtype", "mask", "packing", "longer_documents", "z_loss", "gradient_accumulation", "learning_rate",
        "data", "emulate_nodes", "deterministic", "seed", "steps",
    }
)  # fmt: skip
MAY_FILL = frozenset(key for key in SETTINGS if key.split(".")[0] not in EXPERIMENTS_OWN)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcedValue:
    """One value of an entry."""

    value: Any  # of the setting's type
    reason: str
    source: str  # file and line of the original, its documentation, or a paper


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSettings:
    """What one method is given under one value of `settings`."""

    source: str = ""  # where the set-up as a whole comes from
    choices: Mapping[str, SourcedValue] = field(default_factory=dict)  # by setting
    notes: tuple[str, ...] = ()  # what the original does and no setting here says; sentences


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSources:
    """Which settings of a trial came from its entry, and which of those that entries may fill its experiment gave."""

    filled: tuple[str, ...] = ()
    by_hand: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


NOTHING_FILLED = TableSources()


def method_settings_of(method: str, variant: SettingsFrom) -> MethodSettings | None:
    """The method's entry; None where the table has none. `equal` fills nothing, so every method has that."""
    if variant == EQUAL:
        return MethodSettings()
    return settings_table().get(method, {}).get(variant)


def missing_entry_reason(method: str, variant: SettingsFrom) -> str | None:
    """Why a method cannot run under this value of `settings`, or None."""
    if method_settings_of(method, variant) is not None:
        return None
    return (
        f"settings {variant} has no entry for {method} in baselines/{TABLE_FILE.name}; add one with its sources, or "
        f"set settings to {EQUAL}"
    )


def values_for(method: str, variant: SettingsFrom, given: Collection[str]) -> dict[str, Any]:
    """Values of the method's entry by setting, less those of the settings that the experiment has `given`."""
    entry = method_settings_of(method, variant) or MethodSettings()
    return {name: choice.value for name, choice in entry.choices.items() if not _is_given(name, given)}


def origin_of(method: str, variant: SettingsFrom, given: Collection[str]) -> TableSources:
    """Which settings of such a trial came from where."""
    if variant == EQUAL:
        return NOTHING_FILLED
    entry = method_settings_of(method, variant) or MethodSettings()
    return TableSources(
        filled=tuple(sorted(values_for(method, variant, given))),
        by_hand=tuple(sorted(name for name in MAY_FILL if _is_given(name, given))),
        notes=entry.notes,
    )


def _is_given(setting: str, given: Collection[str]) -> bool:
    """Whether the experiment gave the setting, or the one that it is a part of as a whole."""
    return setting in given or setting.split(".")[0] in given


@cache
def settings_table() -> dict[str, dict[SettingsFrom, MethodSettings]]:
    """The table as a whole: by method, then by value of `settings`."""
    return read_table(TABLE_FILE)


def read_table(path: Path) -> dict[str, dict[SettingsFrom, MethodSettings]]:
    """A file of such entries. Raises UsageError with file and line for whatever is not one."""
    table: dict[str, dict[SettingsFrom, MethodSettings]] = {}
    for method, node in read_yaml(path, "table of settings").mapping("the table").items():
        variants = node.mapping(f"the entry of {method}")
        check_keys(variants, VARIANTS, f"the entry of {method}")
        table[method] = {
            variant: _entry(variants[variant], f"{variant} of {method}") for variant in VARIANTS if variant in variants
        }
        if EQUAL in variants and table[method][EQUAL] != MethodSettings():
            raise UsageError(f"{variants[EQUAL].place}: {EQUAL} of {method} fills settings; write {EQUAL}: {{}}")
    return table


def _entry(node: Node, what: str) -> MethodSettings:
    entries = node.mapping(what)
    check_keys(entries, ("source", "settings", "notes"), what)
    if not entries:
        return MethodSettings()
    if "source" not in entries:
        raise UsageError(f"{node.place}: {what} lacks source; name the file and line, or the paper, that it follows")
    choices = entries["settings"].mapping(f"settings of {what}") if "settings" in entries else {}
    return MethodSettings(
        source=convert(entries["source"], str, "source"),
        choices={name: _choice(name, choice) for name, choice in choices.items()},
        notes=tuple(convert(note, str, "notes") for note in entries["notes"].items()) if "notes" in entries else (),
    )


def _choice(name: str, node: Node) -> SourcedValue:
    if name not in MAY_FILL:
        raise UsageError(f"{node.place}: {name} is no setting that the table may fill; {nearest(name, MAY_FILL)}")
    parts = node.mapping(name)
    check_keys(parts, ("value", "reason", "source"), name)
    if missing := [part for part in ("value", "reason", "source") if part not in parts]:
        raise UsageError(f"{node.place}: {name} lacks {' and '.join(missing)}; add what is missing")
    return SourcedValue(
        value=read_setting(parts["value"], name, TABLE_FILE.parent),
        reason=convert(parts["reason"], str, "reason"),
        source=convert(parts["source"], str, "source"),
    )
