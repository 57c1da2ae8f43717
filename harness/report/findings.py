"""What a run on GPUs found: for each set-up a sentence about its largest point, with every figure behind it.

A method or a setting is called ahead only where the interval of the ratio says so.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.base.lengths import format_length
from harness.metrics.intervals import Interval, median_interval, medians_of_two
from harness.report.results import Row
from harness.report.speedup import (
    Point,
    Speedup,
    apart_text,
    contested_points,
    point_of,
    rounds_of,
    rounds_text,
    speedup,
    spread_text,
    times,
)
from harness.report.tables.head import form_of
from harness.report.tables.ideal import share_of_ideal
from harness.report.tables.table import significant
from harness.report.variants import (
    OWN_METHOD,
    Setup,
    method_name,
    panel_of,
    pooled,
    series_names,
    setting_of,
    setting_text,
    settings_name,
    setup_of,
    setups_of,
    varying_settings,
)
from harness.report.weak_forms import marked, weak_forms
from harness.spec.table import EQUAL

MOST_FINDINGS = 8  # of a run; what is beyond is in the tables

_WORK = {"train": "Training", "attention": "Attention", "lm_head": "LM head"}  # by task, the most telling first


def findings(rows: Sequence[Row]) -> list[str]:
    """Sentences, the most telling first: set-ups in which methods compete before others, training before its parts,
    long sequences before short ones. Of several runs each sentence names its own."""
    contested: dict[Setup, list[Point]] = {}
    for point in contested_points(rows):
        if len(point.measured()) > 1:
            contested.setdefault(setup_of(point.first), []).append(point)
    groups = [group for group in setups_of(rows) if any(row["status"] == "ok" for row in group)]
    groups.sort(key=lambda group: _telling(group, setup_of(group[0]) in contested))
    several_runs = len({row["run"] for row in rows}) > 1
    told: list[str] = []
    for place, group in enumerate(groups):
        if len(told) >= MOST_FINDINGS:
            more = len(groups) - place
            told.append(f"{more} more {'set-up is' if more == 1 else 'set-ups are'} in the tables.")
            break
        points = contested.get(setup_of(group[0]))
        sentences = _of_methods(points, group, rows) if points else _of_one_method(group, rows)
        told += [f"{group[0]['run']}: {one}" if several_runs else one for one in sentences]
    return told


def _telling(group: Sequence[Row], contested: bool) -> tuple[Any, ...]:
    """Sort key of a set-up."""
    longest = max(row["seq_len"] for row in group if row["status"] == "ok")
    return (not contested, list(_WORK).index(group[0]["task"]), -longest)


def _of_methods(points: Sequence[Point], group: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """The largest point at which several methods were measured, and where they change places along the lengths."""
    point = max(points, key=_size_of_point)
    best, other = list(point.measured())[:2]
    trials = _measured(point.by_method[best])
    weak = weak_forms(rows)
    names = {
        method: marked(_name(ok[0], group), id(ok[0]) in weak)
        for method in point.measured()
        if (ok := _measured(point.by_method[method]))
    }
    parts = [f"{names[best]}, {_figures(trials, rows)}", _samples(trials)]
    parts.append(_against(point.speedup(best, other), f"{names[other]}, the best other"))
    if OWN_METHOD in names and OWN_METHOD not in (best, other):
        parts.append(_against(point.speedup(OWN_METHOD, best), names[best], of=names[OWN_METHOD]))
    return [f"{_place(trials[0])}: {'; '.join(part for part in parts if part)}.", *_crossovers(points)]


def _of_one_method(group: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """The largest measured point, and the largest at which settings were swept; one sentence where it is the same."""
    sizes: dict[tuple[Any, ...], list[Row]] = {}
    for row in _measured(group):
        sizes.setdefault(_size(row), []).append(row)
    largest = max(sizes)
    swept = [size for size, here in sizes.items() if len(_variants(here)) > 1]
    told = []
    if largest not in swept:
        trials = sizes[largest]
        parts = [f"{_name(trials[0], group)}, {_figures(trials, rows)}", _samples(trials)]
        told.append(f"{_place(trials[0])}: {'; '.join(parts)}, {_no_baseline(trials[0], group)}.")
    if swept:
        told.append(_of_settings(sizes[max(swept)], group, rows))
    return told


def _of_settings(here: Sequence[Row], group: Sequence[Row], rows: Sequence[Row]) -> str:
    """Which of the swept settings is fastest, how far the next is behind, and which takes the least memory."""
    variants = sorted(_variants(here), key=lambda trials: _seconds_per_token(trials))
    best, following = variants[0], variants[1]
    varying = varying_settings(here)
    names = {id(trials): name for trials, name in zip(variants, _settings(variants, varying), strict=True)}
    methods = {method_name(row) for row in here}
    method = methods.pop() if len(methods) == 1 else best[0]["method"]
    swept = " and ".join(varying) if len(varying) < 3 else f"{len(variants)} choices of {len(varying)} settings"
    found = speedup(best, following)
    first = "fastest with" if found and found.verdict == "faster" else "lowest median with"
    parts = [
        f"{method} by {'form' if best[0]['task'] == 'lm_head' else swept}, {first} {names[id(best)]}: "
        f"{_figures(best, rows)}",
        _samples(best),
        _against(found, names[id(following)]),
    ]
    smallest = min(variants, key=lambda trials: pooled(trials, "peak_memory_gib") or float("inf"))
    memory = pooled(smallest, "peak_memory_gib")
    if smallest is not best and memory is not None:
        share = _seconds_per_token(best) / _seconds_per_token(smallest)
        parts.append(f"least memory with {names[id(smallest)]}: {_gib(memory)} at {times(share)} that speed")
    parts += _lost_settings(best[0], group, varying)
    if best[0]["task"] != "lm_head":  # whose forms are its baselines
        parts.append(_no_baseline(best[0], group))
    return f"{_place(best[0])}: {'; '.join(part for part in parts if part)}."


def _lost_settings(best: Row, group: Sequence[Row], varying: Sequence[str]) -> list[str]:
    """The settings at this size that gave no number, and how they ended."""
    lost = [
        row for row in group
        if row["status"] != "ok" and _size(row) == _size(best) and row["method"] == best["method"]
    ]  # fmt: skip
    if not lost:
        return []
    names = [form_of(row) if row["task"] == "lm_head" else settings_name(row, varying) for row in lost]
    ended = ", ".join(dict.fromkeys(f"{name} ({row['status']})" for name, row in zip(names, lost, strict=True)))
    return [f"no number from {ended}"]


def _crossovers(points: Sequence[Point]) -> list[str]:
    """Where one method is ahead at shorter sequences and another at longer ones; none unless intervals say so.

    Of several parallel sizes or settings only those with the most lengths.
    """
    lines: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        run, experiment, settings = point_of(point.first)
        lines.setdefault((run, experiment, *(item for item in settings if item[0] != "seq_len")), []).append(point)
    line = max(lines.values(), key=lambda line: (len(line), _size_of_point(line[-1])))
    line = sorted(line, key=lambda point: point.first["seq_len"])
    if len({next(iter(point.measured())) for point in line}) < 2:
        return []
    ahead: list[tuple[int, str]] = []
    for point in line:
        best, other = list(point.measured())[:2]
        found = point.speedup(best, other)
        if found and found.verdict == "faster":
            ahead.append((point.first["seq_len"], best))
    for (shorter, first), (longer, then) in itertools.pairwise(ahead):
        if first != then:
            where = f"{_WORK[line[0].first['task']]} {line[0].first['model']}, {_machine(line[0].first)}"
            return [
                f"{where}: {first} is ahead up to {format_length(shorter)} tokens, {then} from {format_length(longer)}."
            ]
    return []


def _size_of_point(point: Point) -> tuple[Any, ...]:
    """Larger for longer sequences, then for more ranks, then for the faster of several settings."""
    return (point.first["seq_len"], point.first["world_size"], -next(iter(point.measured().values())))


def _size(row: Row) -> tuple[Any, ...]:
    return (row["seq_len"], row["world_size"], panel_of(row))


def _measured(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "ok"]


def _variants(here: Sequence[Row]) -> list[list[Row]]:
    """Trials of one size by method and settings; seeds of one choice stand together."""
    variants: dict[tuple[Any, ...], list[Row]] = {}
    for row in here:
        variants.setdefault((row["method"], *point_of(row)), []).append(row)
    return list(variants.values())


def _seconds_per_token(trials: Sequence[Row]) -> float:
    return 1 / (pooled(trials, "tokens_per_gpu_per_second") or float("nan"))


def _settings(variants: Sequence[Sequence[Row]], varying: Sequence[str]) -> list[str]:
    """What tells the choices of settings apart: the form of a loss, the swept values, or what differs from most."""
    firsts = [trials[0] for trials in variants]
    forms = [form_of(row) for row in firsts]
    if firsts[0]["task"] == "lm_head" and len(set(forms)) == len(forms):
        return forms
    if len(varying) == 1:
        short = varying[0].rsplit(".", 1)[-1]
        return [setting_text(varying[0], row[varying[0]]).removeprefix(f"{short} ") for row in firsts]
    if len(firsts) == math.prod(len({setting_of(row, name) for row in firsts}) for name in varying):  # a grid
        return [", ".join(setting_text(name, setting_of(row, name)) for name in varying) for row in firsts]
    usual = {name: Counter(setting_of(row, name) for row in firsts).most_common(1)[0][0] for name in varying}
    changed = [
        [setting_text(name, setting_of(row, name)) for name in varying if setting_of(row, name) != usual[name]]
        for row in firsts
    ]
    return [", ".join(texts) or "none of them changed" for texts in changed]


def _place(row: Row) -> str:
    """`Training llama3_8b, 1M tokens, 4 × H200`, with dtype and mask where they are not bf16 and causal."""
    parts = [f"{_WORK[row['task']]} {row['model']}"]
    if row["dtype"] != "bf16":
        parts.append(row["dtype"])
    if row["task"] == "lm_head":
        parts.append(f"{format_length(row['seq_len'] * row['batch_size'] // row['cp_size'])} tokens per rank")
    else:
        sequences = row["batch_size"] * row["dp_size"] * row["gradient_accumulation"]
        parts.append(f"{f'{sequences} × ' if sequences > 1 else ''}{format_length(row['seq_len'])} tokens")
        if row["mask"] != "causal":
            parts.append(f"mask {row['mask']}")
    if row["settings"] != EQUAL:
        parts.append(f"settings {row['settings']}")
    return ", ".join([*parts, _machine(row)])


def _machine(row: Row) -> str:
    gpu = str(row["gpu"]).removeprefix("NVIDIA ")
    nodes = row["nodes"] or 1
    spread = f" on {nodes} {'emulated ' if row['emulate_nodes'] > 1 else ''}nodes" if nodes > 1 else ""
    return f"{row['world_size']} × {gpu}{spread}"


def _name(row: Row, group: Sequence[Row]) -> str:
    """The trial's series, with the settings in which trials of its size differ."""
    alike = [other for other in group if _size(other) == _size(row)]
    return next(name for other, name in zip(alike, series_names(alike), strict=True) if other is row)


def _figures(trials: Sequence[Row], rows: Sequence[Row]) -> str:
    """Speed with its interval, utilisation, share of what is possible, memory: those that were measured."""
    first = trials[0]
    speed = pooled(trials, "tokens_per_gpu_per_second")
    assert speed is not None, "an ok trial has a speed"
    rounds = list(rounds_of(trials).values())
    tokens = first["tokens_per_gpu_per_second"] * first["step_seconds_median"]  # of one rank and step
    seconds = median_interval(rounds) or medians_of_two(rounds)
    spread = seconds and seconds.inverse_times(tokens)
    between = f" ({spread_text(spread, _speed)})" if spread else ""
    parts = [f"{_speed(speed)} tokens/s per GPU{between}"]
    utilisation, ceiling = pooled(trials, "mfu"), pooled(trials, "mfu_ceiling")
    if first["task"] == "train" and utilisation is not None:
        parts.append(f"{100 * utilisation:.1f}% MFU")
    elif first["task"] != "train" and (rate := pooled(trials, "tflops_per_gpu")) is not None:
        parts.append(f"{significant(3)(rate)} TFLOP/s per GPU")
    ideal = share_of_ideal(first, rows)
    if ideal is not None:
        parts.append(f"{100 * ideal:.1f}% of the ideal (one GPU's time ÷ {first['world_size']})")
    elif utilisation is not None and ceiling is not None:
        parts.append(f"{100 * utilisation / ceiling:.1f}% of what the kernels allow")
    memory = pooled(trials, "peak_memory_gib")
    if memory is not None:
        parts.append(_gib(memory))
    return ", ".join(parts)


def _samples(trials: Sequence[Row]) -> str:
    """`15 steps in 3 rounds`, `5 steps in two rounds`, `one step`."""
    steps, rounds = sum(row["samples"] for row in trials), len(rounds_of(trials))
    if steps == 1:
        return "one step"
    return f"{steps} steps in {rounds_text(rounds)}"


def _against(found: Speedup | None, other: str, of: str = "") -> str:
    """How a trial compares with another: ahead only with an interval that says so."""
    if found is None:
        return ""
    subject = f"{of} " if of else ""
    apart = f"; {apart_text(found.apart)}" if found.apart else ""
    if not isinstance(found.spread, Interval):
        between = f" ({found.between})" if found.spread else ""
        return f"{subject}{'at ' if of else ''}{times(found.value)} the speed of {other}{between}{apart}"
    relation = {"faster": "ahead of", "slower": "behind"}.get(found.verdict, "not distinguishable from")
    return f"{subject}{relation} {other}: {times(found.value)} its speed ({found.between}){apart}"


def _no_baseline(row: Row, group: Sequence[Row]) -> str:
    """Why nothing is compared: what the other methods at this size ended with, or that there are none."""
    others = [other for other in group if _size(other) == _size(row) and other["method"] != row["method"]]
    if not others:
        return "no baseline measured"
    if any(other["status"] == "ok" for other in others):
        return "no other method at equal settings"
    ended = sorted({f"{other['method']} {other['status']}" for other in others})
    return f"no other method gave a number ({', '.join(ended)})"


def _speed(value: float) -> str:
    return significant(4)(value)


def _gib(value: float) -> str:
    return f"{significant(3)(value)} GiB"
