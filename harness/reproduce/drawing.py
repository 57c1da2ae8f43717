"""A figure of the paper drawn with ours: measured solid, published hatched, computed crossed, predicted in outline.

Each bar carries its hardware in its name. A group is one model, number of GPUs and length; where GPUs of several kinds
share a model, a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from harness.base.lengths import format_length
from harness.predict.published import ARTIFACT
from harness.report.drawing.charts import Bar, Bars, paint_bars
from harness.report.drawing.looks import method_colour
from harness.report.drawing.points import SeriesPoint, number_text, whisker_note
from harness.report.drawing.sheet import Sheet
from harness.reproduce.comparison import FigureComparison
from harness.reproduce.figures import METRICS
from harness.reproduce.points import PUBLISHED_ROWS, FigurePoint, Origin, gpu_text

MAX_BARS = 60
_HATCH: Mapping[Origin, str] = {"measured": "", "published": "////", "computed": "xxxx", "predicted": ""}
_TIMED = frozenset({"tokens_per_gpu_per_second", "tflops_per_gpu"})  # proportional to the inverse of the step's time
_PALE = (1.0, 0.65, 0.85, 0.45, 0.3)  # faces of measured variants of one method


def draw_reproduction(found: FigureComparison, metric: str, predictor: str = "") -> Sheet | None:
    """The figure of one metric; None where no entry has it. `predictor` names what the predicted values are."""
    entries = [entry for entry in found.entries if metric in entry.values or entry.status not in ("ok", "wrong")]
    if not any(metric in entry.values for entry in entries):
        return None
    groups, points, left = _groups(found, metric, entries)
    return Sheet(
        title=found.figure.title,
        about=" · ".join([METRICS[metric].unit, *sorted({_where(entry) for entry in entries} - {""})]),
        notes=_notes(found, entries, points if metric in _TIMED else [], left, predictor),
        plot=partial(paint_bars, groups=groups, unit=METRICS[metric].unit),
    )


def name_of(entry: FigurePoint) -> str:
    """The series as a bar has it: `Burst-Ring · A800-80GB, published`."""
    who: str = entry.origin
    if entry.origin in ("measured", "predicted") and entry.settings:
        who = f"{entry.origin}, {entry.settings.replace('_', ' ')} settings"
    place = "" if entry.hardware == PUBLISHED_ROWS else f" · {gpu_text(entry.hardware)}"
    return f"{entry.series}{place}, {who}"


def panel_name(entry: FigurePoint) -> str:
    """Model and GPUs: `14b, 32 GPUs`, with the CP size where it is another number."""
    parts = [entry.model]
    if entry.gpus:
        one = "GPU" if entry.hardware != "cpu" else "CPU rank"
        parts.append(f"{entry.gpus} {one}{'s' if entry.gpus > 1 else ''}")
    if entry.cp_size:
        parts.append(f"CP {entry.cp_size}")
    return ", ".join(parts)


def _groups(
    found: FigureComparison, metric: str, entries: Sequence[FigurePoint]
) -> tuple[list[Bars], list[SeriesPoint], int]:
    """Bars by model and length in the order of the figure's series, those with published numbers first; the points
    behind them, and how many bars are left out."""
    order = [*found.figure.series, *(entry.series for entry in entries)]
    theirs = {panel_name(entry) for entry in entries if entry.origin in ("published", "computed")}
    places: dict[tuple[bool, str, int], dict[tuple[int, str], list[FigurePoint]]] = {}
    for entry in entries:
        place = (panel_name(entry) not in theirs, panel_name(entry), entry.at)
        key = (order.index(entry.series), name_of(entry))
        places.setdefault(place, {}).setdefault(key, []).append(entry)
    variants: dict[tuple[str, str], list[str]] = {}  # names by method and origin
    for entry in entries:
        alike = variants.setdefault((entry.method, entry.origin), [])
        alike += [name_of(entry)] if name_of(entry) not in alike else []
    groups: list[Bars] = []
    points, left = [], 0
    for (_, panel, at), series in sorted(places.items(), key=lambda item: item[0]):
        along = f"batch size {at}" if found.figure.along == "batch_size" else f"{format_length(at).upper()} tokens"
        bars = []
        for (_, name), members in sorted(series.items()):
            points.append(SeriesPoint(series=name, seq_len=at, rows=[_row(entry) for entry in members]))
            variant = variants[members[0].method, members[0].origin].index(name)
            bars.append(_bar(points[-1], members[0], metric, f"{panel}, {along}", variant))
        drawn = sum(len(group.bars) for group in groups)
        if drawn and drawn + len(bars) > MAX_BARS:
            left += len(bars)
        else:
            groups.append(Bars(title=f"{panel}, {along}", bars=bars))
    return groups, points, left


def _bar(point: SeriesPoint, entry: FigurePoint, metric: str, where: str, variant: int) -> Bar:
    value = point.value(metric)
    ends = point.drawn_whisker(metric) if metric in _TIMED else None
    text = point.lost if value is None else number_text(value, ends)
    return Bar(
        name=point.series, value=value, text=text, tip=f"{point.series}, {where}: {text} {METRICS[metric].unit}",
        colour=method_colour(entry.method), alpha=_PALE[variant % len(_PALE)], hatch=_HATCH[entry.origin],
        dashed=entry.origin == "predicted", strong=entry.origin == "measured", ends=ends,
    )  # fmt: skip


def _row(entry: FigurePoint) -> dict[str, Any]:
    """What a bar is drawn of: the values, and of a measured one what its whisker needs."""
    spread = ("step_seconds_median", "step_seconds_iqr", "step_seconds_low", "step_seconds_high",
              "step_seconds_by_round")  # fmt: skip
    row = dict.fromkeys(spread) | {name: (entry.row or {}).get(name) for name in spread}
    return row | {"status": entry.status} | dict(entry.values)


def _where(entry: FigurePoint) -> str:
    return "" if entry.hardware == PUBLISHED_ROWS else gpu_text(entry.hardware)


def _notes(
    found: FigureComparison, entries: Sequence[FigurePoint], timed: Sequence[SeriesPoint], left: int, predictor: str
) -> list[str]:
    origins = {entry.origin for entry in entries}
    library = found.figure.reference.startswith("burstattention")
    source = "the README of MayDomine/Burst-Attention" if library else f"the sheets and scripts of {ARTIFACT}"
    notes = [f"Hatched: published, read from {source} (single samples; the paper's own figures were not read)."]
    if "computed" in origins:
        notes.append("Crosses: computed here; no measurement is needed.")
    if "measured" in origins:
        notes.append("Solid: measured by this project, medians.")
        if timed and (note := whisker_note([point.rows for point in timed])):
            notes.append(note)
    if "predicted" in origins:
        notes.append(f"Outlined: predicted ({predictor}).")
    for panel in dict.fromkeys(map(panel_name, entries)):
        here = {_where(entry) for entry in entries if panel_name(entry) == panel} - {""}
        if len(here) > 1:
            notes.append(f"GPUs of several kinds share {panel}: {', '.join(sorted(here))}.")
    if left:
        notes.append(f"{left} more bars are in the table alone.")
    if found.figure.note:
        notes.append(found.figure.note)
    return notes
