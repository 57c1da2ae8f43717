"""The set-up that a figure shows, the panel and the series that a row belongs to, and their names.

A sweep may vary anything. Method, sequence length and parallel sizes have their own place in a figure. A series is
named by its method, what the method ran (`ran`), and every other setting that varies, so that two bars with different
settings never look alike. Steps, warm-up and seeds are no part of a name.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from harness.report.results import ONE_RANK, Row, is_given, method_rank, setting_names, sortable
from harness.spec.table import EQUAL

OWN_METHOD = "burst"  # the one whose schedule and backward are settings; other methods bring theirs

# Settings that have a place of their own: set-up, panel, horizontal axis, colour; seeds and steps, over which we pool.
_PLACED = frozenset(
    {"task", "model", "dtype", "mask", "cp_size", "tp_size", "world_size", "seq_len", "method", "seed", "steps"}
)

Setup = tuple[Any, ...]


def setup_of(row: Row) -> Setup:
    """Key of the rows one figure shows together: one run, experiment, task, model shape, dtype and mask."""
    shape = tuple((name, row[name]) for name in _model_columns(tuple(row)))
    return (row["run"], row["experiment"], row["task"], row["model"], row["dtype"], row["mask"], shape)


@lru_cache(maxsize=1024)
def _model_columns(columns: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(name for name in columns if name.startswith("model.")))


@lru_cache(maxsize=1024)
def _unplaced_settings(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Of the columns, in sorted order, settings that have no place of their own."""
    names = setting_names(dict.fromkeys(columns))
    return tuple(name for name in names if name.split(".")[0] not in _PLACED)


def setups_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows split by set-up, in order of first appearance."""
    groups: dict[Setup, list[Row]] = {}
    for row in rows:
        groups.setdefault(setup_of(row), []).append(row)
    return list(groups.values())


def setup_name(rows: Sequence[Row]) -> str:
    """The set-up of `rows` in words: model, dtype, mask and device."""
    first = rows[0]
    devices = sorted({row["gpu"] for row in rows if row["gpu"]}) or ["unknown device"]
    alike = {row["settings"] for row in rows} == {first["settings"]} != {EQUAL}
    parts = [f"model {first['model']}", first["dtype"], f"{first['mask']} mask", *devices]
    return " · ".join([*parts, *([f"settings {first['settings']}"] if alike else [])])


def models_of(rows: Sequence[Row]) -> list[str | None]:
    """Model and dtype of every row, in order, where the rows have several; a table without a need has no column."""
    several = len({row["model"] for row in rows}) > 1 or len({row["dtype"] for row in rows}) > 1
    return [f"{row['model']} {row['dtype']}" if several else None for row in rows]


def masks_of(rows: Sequence[Row]) -> list[str | None]:
    """Mask of every row, likewise."""
    several = len({row["mask"] for row in rows}) > 1
    return [row["mask"] if several else None for row in rows]


def varying_settings(rows: Iterable[Row]) -> list[str]:
    """Names of the settings that differ between `rows` and have no place of their own, sorted.

    What `settings: as_published` or `tuned` filled differs by method, and is said by the name of `settings` alone.
    """
    values: dict[str, set[Any]] = {}
    for row in rows:
        for name in _unplaced_settings(tuple(row)):
            seen = values.setdefault(name, set())
            if is_given(row, name):
                seen.add(row[name])
    return [name for name, seen in values.items() if len(seen) > 1]


def on_cpu(row: Row) -> bool:
    """Whether a trial's ranks were processes on a CPU."""
    return row["gpu"] in (None, "cpu")


def method_name(row: Row) -> str:
    """Method and what it ran: `burst (ring, query side)`, `burst (auto: ulysses, copy engine)`, `ulysses (all-to-all)`.

    `auto` says that the cost model chose the schedule. The method alone for a trial that was not measured, or on one
    rank.
    """
    method, ran = row["method"], row["ran"]
    if ran in (None, ONE_RANK):
        return str(method)
    if method == OWN_METHOD:
        return f"{method} ({'auto: ' if row['schedule'] == 'auto' else ''}{ran})"
    schedule, _, rest = ran.partition(", ")
    if schedule.replace(" ", "_") in (method, method.partition("_")[2]):  # the method's name says it
        ran = rest
    return f"{method} ({ran})" if ran else method


def series_name(row: Row, varying: Sequence[str]) -> str:
    """`method_name`, and what else distinguishes the series: `burst (ring, query side), kernel cudnn`."""
    settings = [
        setting_text(name, row.get(name)) for name in varying if is_given(row, name) and not _said_by_name(row, name)
    ]
    return ", ".join([method_name(row), *settings])


def _said_by_name(row: Row, setting: str) -> bool:
    """Whether `method_name` tells the setting's value from every other."""
    if setting not in ("schedule", "backward"):
        return False
    if row["method"] != OWN_METHOD or (setting == "schedule" and row["schedule"] == "auto"):
        return bool(row[setting] == "auto")
    return row["ran"] not in (None, ONE_RANK) and row[setting] == row.get(f"chosen_{setting}")


def series_of(rows: Sequence[Row], varying: Sequence[str] | None = None) -> list[tuple[str, list[Row]]]:
    """Rows split by series: methods in their usual order, variants of one method in the order of their settings.

    `varying` names the settings that tell series apart; by default all that vary.

    A row without a measurement, or of one rank, joins the rows with its settings where all of these ran the same.
    """
    varying = varying_settings(rows) if varying is None else varying

    def variant(row: Row) -> tuple[Any, ...]:
        return (row["method"], *(row.get(name) for name in varying))

    named: dict[tuple[Any, ...], set[str]] = {}
    for row in rows:
        if method_name(row) != row["method"]:
            named.setdefault(variant(row), set()).add(series_name(row, varying))
    groups: dict[str, list[Row]] = {}
    for row in rows:
        names = named.get(variant(row), set())
        alone = method_name(row) == row["method"] and len(names) == 1
        groups.setdefault(next(iter(names)) if alone else series_name(row, varying), []).append(row)

    def order(item: tuple[str, list[Row]]) -> tuple[Any, ...]:
        name, members = item
        return (method_rank(members[0]["method"]), [sortable(members[0].get(key)) for key in varying], name)

    return sorted(groups.items(), key=order)


def settings_name(row: Row, varying: Sequence[str]) -> str:
    """The varying settings alone, whatever method they were given to."""
    return ", ".join(setting_text(name, row.get(name)) for name in varying if is_given(row, name))


def panel_of(row: Row) -> tuple[int, int, int]:
    """Key of the panel a row is drawn in: its parallel sizes."""
    return (row["cp_size"], row["tp_size"], row["world_size"])


def panel_name(panel: tuple[int, int, int]) -> str:
    """The parallel sizes in words: `CP 4`, with TP when used and the ranks when there are data-parallel replicas."""
    cp_size, tp_size, world_size = panel
    name = f"CP {cp_size}" if tp_size == 1 else f"CP {cp_size} × TP {tp_size}"
    return name if world_size == cp_size * tp_size else f"{name}, {world_size} ranks"


def pooled(rows: Iterable[Row], column: str) -> float | None:
    """Median of `column` over the rows of one point that have it (several seeds, say); None when none has."""
    values = [row[column] for row in rows if row.get(column) is not None]
    return float(statistics.median(values)) if values else None


def setting_text(name: str, value: object) -> str:
    """A setting by the last part of its name, and its whole value: two values never read the same."""
    short = name.rsplit(".", 1)[-1]
    return f"{short} {'on' if value else 'off'}" if isinstance(value, bool) else f"{short} {value}"
