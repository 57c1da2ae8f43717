"""The set-up that a figure shows, the panel and the series that a row belongs to, and their names.

A sweep may vary anything. Method, sequence length and parallel sizes have their own place in a figure. A series is
named by the short name of its method and by the settings that tell it from others of that name: two series never have
equal names. Steps, warm-up and seeds are no part of a name, versions and builds stand in `footnotes_of`.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from harness.base.errors import UsageError, nearest
from harness.base.lengths import format_length
from harness.report.results import (
    ONE_RANK,
    TENSOR_PARALLEL,
    UPSTREAM,
    Row,
    grouped,
    is_given,
    method_rank,
    setting_names,
    sortable,
)
from harness.spec.table import EQUAL

OWN_METHOD = "burst"  # the one whose schedule and backward are settings; other methods bring theirs
LABEL, SUBJECT = "method_label", "subject"  # columns that `with_subject` adds

PLANNED = "auto"

# Settings that have a place of their own (set-up, panel, horizontal axis, colour), seeds and steps, over which we pool,
# and the names of what the planner chose.
_PLACED = frozenset(
    {
        *("task", "model", "dtype", "mask", "cp_size", "tp_size", "world_size", "seq_len", "method"),
        *("seed", "steps", "planned"),
    }
)

_SCHEDULES = {
    "double_ring": "double ring", "ulysses": "Ulysses", "usp": "USP", "usp_transposed": "USP transposed",
}  # fmt: skip
_ARRANGEMENTS = {"p2p": "ring", "a2a": "Ulysses", "ulysses": "Ulysses", "all_gather": "all-gather",
                 "zigzag ring": "zigzag"}  # fmt: skip

_FOR_ALL = ("settings",)  # what decides whether trials compare is said of every method, or usual for all of them


Setup = tuple[object, ...]
_Series = tuple[str, str, tuple[Any, ...]]  # method, `method_name`, values of the varying settings


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
    return list(grouped(rows, setup_of).values())


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
    values: dict[str, set[object]] = {}
    for row in rows:
        for name in _unplaced_settings(tuple(row)):
            seen = values.setdefault(name, set())
            # `checkpoint.plan` tells a row whose values the planner chose from those set by hand.
            if is_given(row, name) and not _is_planned(row, name):
                seen.add(row[name])
    return [name for name, seen in values.items() if len(seen) > 1]


def on_cpu(row: Row) -> bool:
    """Whether a trial's ranks were processes on a CPU."""
    return row["gpu"] in (None, "cpu")


def setting_of(row: Row, name: str) -> object:
    """The value of a setting as a user gave it: `auto` where the planner chose it, by the length or the budget."""
    return PLANNED if _is_planned(row, name) else row.get(name)


def _is_planned(row: Row, name: str) -> bool:
    return name in str(row.get("planned") or "").split()


def with_subject(rows: Sequence[Row], subject: str | None, labels: Mapping[str, str]) -> list[Row]:
    """The rows, told which of them are of the method that is put beside the others (`burst` unless `subject` says), and
    by which name a method of `labels` is shown. Raises UsageError for a method that no row has, and where two methods
    would be shown by one name."""
    methods = sorted({row["method"] for row in rows}, key=method_rank)
    for option, named in (("--subject", [subject] if subject else []), ("--label", list(labels))):
        for method in named:
            if method not in methods:
                known = nearest(method, methods)
                raise UsageError(f"{option} {method}: no trial of these records is of that method; {known}")
    shown = Counter(labels.get(method, method) for method in methods)
    if twice := [name for name, count in shown.items() if count > 1]:
        raise UsageError(f"--label: two methods would be called {twice[0]!r}; give each a name of its own")
    return [
        row
        | ({SUBJECT: row["method"] == subject} if subject else {})
        | ({LABEL: labels[row["method"]]} if row["method"] in labels else {})
        for row in rows
    ]


def is_subject(row: Row) -> bool:
    """Whether a row is of the method that is put beside the others."""
    return bool(row.get(SUBJECT, row["method"] == OWN_METHOD))


def subject_name(rows: Iterable[Row]) -> str:
    """What the method that is put beside the others is called: `burst` where no row is of it."""
    return next((str(row.get(LABEL) or row["method"]) for row in rows if is_subject(row)), OWN_METHOD)


def method_name(row: Row) -> str:
    """The short name that people use: `burst (Ulysses)`, `megatron_cp`, `Megatron-LM`, `TransformerEngine, all-gather`.

    Of burst it says the schedule that ran, of an attention function that it calls the arrangement; neither for a trial
    that was not measured, or on one rank. Versions, builds and sides of backward are in `footnotes_of`.
    """
    method, shared = str(row["method"]), row["ran"] not in (None, ONE_RANK)
    if method.endswith(UPSTREAM):
        arrangement = row.get("chosen_arrangement") if shared else None
        return f"{system_name(row)}, {_arranged(arrangement)}" if arrangement else system_name(row)
    name = str(row.get(LABEL) or method)
    if method == OWN_METHOD and shared and (schedule := row.get("chosen_schedule")):
        return f"{name} ({_SCHEDULES.get(schedule, schedule)})"
    return name


def system_name(row: Row) -> str:
    """The name that people use for the upstream system of a row: `TransformerEngine`."""
    return str(row.get(LABEL) or row["system"] or row["method"]).replace("Liger-Kernel", "Liger")


def _arranged(words: str) -> str:
    """The arrangement in which an attention function ran, in the words used for schedules."""
    for theirs, ours in _ARRANGEMENTS.items():
        words = re.sub(rf"\b{theirs}\b", ours, words)
    parts = [part.rpartition(" ") for part in words.split(" x ")]
    used = [name for name, _, ranks in parts if ranks != "1"]
    return used[0] if len(parts) > 1 and len(used) == 1 else words.replace(" x ", " × ")


def series_of(rows: Sequence[Row], varying: Sequence[str] | None = None) -> list[tuple[str, list[Row]]]:
    """Rows split by series: methods in their usual order, variants of one method in the order of their settings.

    `varying` names the settings that tell series apart; by default all that vary. A row without a measurement, or of
    one rank, joins the rows with its settings where all of these have one name.
    """
    varying = varying_settings(rows) if varying is None else varying
    named: dict[tuple[object, ...], set[str]] = {}
    for row in rows:
        if not _ran_nothing(row):
            named.setdefault((row["method"], *_variant(row, varying)), set()).add(method_name(row))
    groups: dict[_Series, list[Row]] = {}
    for row in rows:
        variant = _variant(row, varying)
        names = named.get((row["method"], *variant), set())
        name = next(iter(names)) if _ran_nothing(row) and len(names) == 1 else method_name(row)
        groups.setdefault((row["method"], name, variant), []).append(row)
    names_of = _named(groups, varying)

    def order(item: tuple[_Series, list[Row]]) -> tuple[Any, ...]:
        (method, _, _), members = item
        values = [sortable(setting_of(members[0], name)) for name in varying]
        return (method_rank(method), values, names_of[item[0]])

    return [(names_of[series], members) for series, members in sorted(groups.items(), key=order)]


def series_names(rows: Sequence[Row]) -> list[str]:
    """The name of every row's series, in order; a trial without a measurement is never said to have run anything."""
    varying = varying_settings(rows)
    keys: list[_Series] = [(row["method"], method_name(row), _variant(row, varying)) for row in rows]
    names = _named({key: [row] for key, row in zip(keys, rows, strict=True)}, varying)
    return [names[key] for key in keys]


def unsaid_settings(rows: Sequence[Row]) -> dict[str, str]:
    """What holds where names say nothing else, in words: under "" for all of them, else by the name that is meant."""
    varying = varying_settings(rows)
    keys = list(dict.fromkeys((row["method"], method_name(row), _variant(row, varying)) for row in rows))
    found = {}
    for name in ("", *dict.fromkeys(key[1] for key in keys)):
        members = [key for key in keys if not name or key[1] == name]
        asked = [one for one in varying if (one in _FOR_ALL) != bool(name)]
        told = {
            one: value
            for one, value in _usual(members, varying).items()
            if one in asked and len({key[2][varying.index(one)] for key in members}) > 1
        }
        if words := ", ".join(setting_text(one, value) for one, value in told.items() if value is not None):
            found[name] = words
    return found


def _variant(row: Row, varying: Sequence[str]) -> tuple[Any, ...]:
    """Values of the varying settings; None of what the table of set-ups or the planner chose, as other settings say."""
    return tuple(row.get(name) if is_given(row, name) and not _is_planned(row, name) else None for name in varying)


def _ran_nothing(row: Row) -> bool:
    return row["ran"] in (None, ONE_RANK)


def _named(series: Mapping[_Series, Sequence[Row]], varying: Sequence[str]) -> dict[_Series, str]:
    """A name of its own for each series: its method, and the settings in which it differs from most of that name."""
    alike: dict[str, list[_Series]] = {}
    for key in series:
        alike.setdefault(key[1], []).append(key)
    names: dict[_Series, str] = {}
    of_all = {name: value for name, value in _usual(list(series), varying).items() if name in _FOR_ALL}
    for members in alike.values():
        usual = {name: value for name, value in _usual(members, varying).items() if name not in _FOR_ALL} | of_all
        for key in members:
            names[key] = _with_settings(key, varying, usual)
    counts = Counter(names.values())
    doubtful = [key for key, name in names.items() if counts[name] > 1]
    for key in doubtful:
        methods = {other[0] for other in doubtful if other[1] == key[1]}
        names[key] = _with_settings(key, varying, {}) + (f" [{key[0]}]" if len(methods) > 1 else "")
    return names


def _usual(members: Sequence[_Series], varying: Sequence[str]) -> dict[str, Any]:
    """The value of a setting that more than half of the series have, where there is one."""
    found = {}
    for place, name in enumerate(varying):
        [(value, count)] = Counter(key[2][place] for key in members).most_common(1)
        if 2 * count > len(members):
            found[name] = value
    return found


def _with_settings(key: _Series, varying: Sequence[str], usual: Mapping[str, Any]) -> str:
    _, name, variant = key
    told = [
        setting_text(setting, value)
        for setting, value in zip(varying, variant, strict=True)
        if not (setting in usual and usual[setting] == value) and value is not None
    ]
    return ", ".join([name, *told])


def settings_name(row: Row, varying: Sequence[str]) -> str:
    """The varying settings alone, whatever method they were given to; `plan auto` says all that the planner chose."""
    told = (name for name in varying if is_given(row, name) and not _is_planned(row, name))
    return ", ".join(setting_text(name, row.get(name)) for name in told)


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
    """A setting by the last part of its name, and its whole value: two values never read the same. A budget of memory
    and the name of a set-up are said without it: `24 GiB`, `whole GPU`, `as published`."""
    short = name.rsplit(".", 1)[-1]
    if name == "memory":
        return re.sub(r"(?<=\d)(?=[A-Za-z])", " ", str(value)) if value else "whole GPU"
    if name == "settings":
        return "equal settings" if value == EQUAL else str(value).replace("_", " ")
    return f"{short} {'on' if value else 'off'}" if isinstance(value, bool) else f"{short} {value}"


def span_text(lengths: Iterable[int], form: Callable[[int], str] = format_length) -> str:
    """From the shortest to the longest: `16k to 128k tokens`."""
    found = sorted(lengths)
    return f"{' to '.join(dict.fromkeys(map(form, (found[0], found[-1]))))} tokens"


# What short names of series leave out: releases, builds, kernels, and how attention was exchanged.

KERNELS = {
    "fa4": "FlashAttention-4", "fa3": "FlashAttention-3", "fa2": "FlashAttention-2", "cudnn": "cuDNN",
    "flex": "FlexAttention", "cpu": "torch on the CPU", "reference": "the reference in torch",
}  # fmt: skip
_PACKAGES = {"transformer-engine": "TransformerEngine"}
_BUILD = "extra_upstream.builds."


def footnotes_of(rows: Sequence[Row]) -> list[str]:
    """A sentence for each name among the measured rows that leaves something out, in their order, such as
    `Megatron-LM: megatron-core 0.19.2, TransformerEngine 2.12.0 compiled -O1, attention by cuDNN.`

    Where a method did several things under one name, each stands with the lengths at which it did. Last come the
    attention kernels, and what holds where names say nothing else.
    """
    measured = [row for row in rows if row["status"] == "ok"]
    lines = []
    for name, alike in grouped(filter(_left_out, measured), _called).items():
        told = grouped(alike, lambda row: ", ".join(_left_out(row)))  # several where it did several things
        spans = [span_text(row["seq_len"] for row in members) for members in told.values()]
        texts = [f"{text} ({span})" for text, span in zip(told, spans, strict=True)] if len(told) > 1 else list(told)
        lines.append(f"{name}: {'; '.join(texts)}.")
    lines += _of_kernels(measured)
    for name, words in unsaid_settings(measured).items():
        lines.append(f"{name or 'All'}, where a name does not say otherwise: {words}.")
    return lines


def kernel_in_words(kernel: str | None) -> str:
    """The name of an attention kernel as its authors write it; empty where it is not known. Where torch chooses, its
    first choice, said to be that."""
    if not kernel or kernel.startswith("unknown"):
        return ""
    asked = first_kernel(kernel)
    return KERNELS.get(asked, asked) + ("" if asked == kernel else " as torch's first choice")


def first_kernel(kernel: str) -> str:
    """The kernel that runs, and of torch's order of choice (`torch: cudnn, else flash`) the first."""
    return kernel.removeprefix("torch: ").partition(", else ")[0]


def _called(row: Row) -> str:
    return system_name(row) if row["method"].endswith(UPSTREAM) else method_name(row)


def _left_out(row: Row) -> list[str]:
    if row["method"].endswith(UPSTREAM):
        release, builds = str(row.get("extra_upstream.release") or ""), _builds(row)
        rebuilt = any(name == release.partition(" ")[0] for name in builds)
        return [
            *([release] if release and not rebuilt else []),
            *(f"{_PACKAGES.get(name, name)} {words}" for name, words in builds.items()),
        ]
    if row["ran"] in (None, ONE_RANK, TENSOR_PARALLEL):
        return []
    schedule, *rest = row["ran"].split(", ")
    parts = [] if schedule.replace(" ", "_") in (row.get("chosen_schedule"), row["method"]) else [schedule]
    for part in rest:
        parts.append(f"backward sends the {part}" if part.endswith(" side") else f"heads exchanged by {part}")
    return [part for part in parts if part != "heads exchanged by none"]


def _builds(row: Row) -> dict[str, str]:
    """Packages that are another build than their authors', by the shortest name of each: `2.12.0 compiled -O1`."""
    found: dict[str, str] = {}
    for column in sorted((name for name in row if name.startswith(_BUILD) and row[name]), key=len):
        words = str(row[column]).partition(" (archive")[0].replace(", another build:", "")
        if words not in found.values():
            found[column.removeprefix(_BUILD)] = words
    return found


def _of_kernels(measured: Sequence[Row]) -> list[str]:
    """Which kernel computed the attention of which names, unless names say it."""
    if "kernel" in varying_settings(measured):
        return []
    attending = [row for row in measured if row["task"] not in ("lm_head", "linear")]
    by_kernel = grouped(attending, lambda row: kernel_in_words(row.get("chosen_kernel")))
    by_kernel.pop("", None)
    everybody, lines = set(map(_called, attending)), []
    for kernel, rows in by_kernel.items():
        *others, last = dict.fromkeys(map(_called, rows))
        whose = f" of {', '.join(others)} and {last}" if others else f" of {last}"
        lines.append(f"Attention kernel{'' if {*others, last} == everybody else whose}: {kernel}.")
    return lines
