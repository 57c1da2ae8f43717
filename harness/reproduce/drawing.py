"""A figure of the paper drawn with ours: measured solid, published hatched, computed crossed, predicted in outline.

Each series carries its hardware in its name. A panel is one model and number of GPUs; where GPUs of several kinds share
a panel, a note says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from harness.report.drawing.bars import arrange, draw_bars
from harness.report.drawing.by_length import columns_of_panels
from harness.report.drawing.looks import INK, MUTED, Look, bar_key, method_colour, mixed
from harness.report.drawing.notes import whisker_note
from harness.report.drawing.points import Measure, Panel, Point
from harness.report.drawing.sheet import Form, Sheet, in_both_forms, panel_title, sheet, value_axis
from harness.reproduce.beside import Beside
from harness.reproduce.entries import PUBLISHED_ROWS, UNIT_OF, Entry, Origin, gpu_text
from harness.reproduce.published import ARTIFACT

MAX_PANELS = 16
_SHADES = (0.0, -0.4, 0.45, -0.65, 0.7, 0.25, -0.2, 0.85)  # of variants of one method
_HATCH: Mapping[Origin, str] = {"measured": "", "published": "////", "computed": "xxxx", "predicted": ""}
_TIMED = frozenset({"tokens_per_gpu_per_second", "tflops_per_gpu"})  # proportional to the inverse of the step's time


@dataclass(frozen=True, kw_only=True, slots=True)
class OriginLook(Look):
    """A bar's look by whose number it is, in the colour of its series."""

    origin: Origin = "measured"
    shade: float = 0.0

    @property
    def bar(self) -> dict[str, Any]:
        colour = mixed(self.colour, self.shade)
        if self.origin == "measured":
            return {"facecolor": colour, "edgecolor": colour, "linewidth": 0.5}
        dashes = {"linestyle": (0, (3, 2))} if self.origin == "predicted" else {}
        return {
            "facecolor": "white", "edgecolor": colour, "linewidth": 1.0, "hatch": _HATCH[self.origin], **dashes,
        }  # fmt: skip


def draw_reproduction(found: Beside, metric: str, predictor: str = "") -> Sheet | None:
    """The figure of one metric; None where no entry has it. `predictor` names what the predicted values are."""
    entries = [entry for entry in found.entries if metric in entry.values or entry.status not in ("ok", "wrong")]
    if not any(metric in entry.values for entry in entries):
        return None
    return in_both_forms(lambda form: _draw(form, found, metric, entries, predictor))


def name_of(entry: Entry) -> str:
    """The series as the legend has it: `Burst-Ring · A800-80GB, published`."""
    who: str = entry.origin
    if entry.origin in ("measured", "predicted") and entry.settings:
        who = f"{entry.origin}, {entry.settings.replace('_', ' ')} settings"
    place = "" if entry.hardware == PUBLISHED_ROWS else f" · {gpu_text(entry.hardware)}"
    return f"{entry.series}{place}, {who}"


def panel_name(entry: Entry) -> str:
    """Model and GPUs: `14b, 32 GPUs`, with the CP size where it is another number."""
    parts = [entry.model]
    if entry.gpus:
        one = "GPU" if entry.hardware != "cpu" else "CPU rank"
        parts.append(f"{entry.gpus} {one}{'s' if entry.gpus > 1 else ''}")
    if entry.cp_size:
        parts.append(f"CP {entry.cp_size}")
    return ", ".join(parts)


def _draw(form: Form, found: Beside, metric: str, entries: Sequence[Entry], predictor: str) -> Sheet:
    looks = _looks(entries, list(found.figure.series))
    panels, left = _panels(entries, list(looks))
    places = [arrange(panel) for panel in panels]
    measure = Measure(column=metric, unit=UNIT_OF[metric], timed=metric in _TIMED)
    inches = [max(form.panel_inches, form.bar_inches * place.width) for place in places]
    columns = columns_of_panels(inches, form)
    widths = [max(inches[place::columns]) for place in range(columns)]
    shown = {point.series for panel in panels for point in panel.points}
    figure, axes = sheet(
        form,
        rows=-(-len(places) // columns),
        widths=widths,
        title=found.figure.title,
        about=" · ".join([UNIT_OF[metric], *sorted({_where(entry) for entry in entries} - {""})]),
        notes=_notes(found, entries, measure, panels, left, predictor),
        legend=[bar_key(name, look) for name, look in looks.items() if name in shown],
        sharey="none",
    )
    cells: list[Axes] = [ax for line in axes for ax in line]
    for ax in cells[len(places) :]:
        ax.set_visible(False)
    for index, (ax, panel, place) in enumerate(zip(cells, panels, places, strict=False)):
        values = [value for point in panel.points if (value := point.value(metric)) is not None]
        value_axis(ax, values, bars=True, room=1.42 if form.paper else 1.3)
        draw_bars(ax, place, looks, measure, form, room=widths[index % columns] / form.bar_inches)  # type: ignore[arg-type]
        if found.figure.along == "batch_size":
            ax.set_xticks([x for x, _ in place.ticks], [str(batch) for _, batch in place.ticks])
        panel_title(ax, panel.title, widths[index % columns], form)
        if index + columns >= len(places):
            along = "batch size" if found.figure.along == "batch_size" else "tokens"
            ax.set_xlabel(along, fontsize=form.label, color=MUTED)
        if index % columns == 0:
            ax.set_ylabel(UNIT_OF[metric], fontsize=form.label, color=INK)
    return figure


def _looks(entries: Sequence[Entry], given: Sequence[str]) -> dict[str, OriginLook]:
    """A look for each series by its name, in the order of the figure: series by series, published ones first."""
    variants: dict[str, list[str]] = {}  # series by method
    for entry in entries:
        of_method = variants.setdefault(entry.method, [])
        if entry.series not in of_method:
            of_method.append(entry.series)
    order = [*given, *(series for members in variants.values() for series in members if series not in given)]
    looks: dict[str, OriginLook] = {}
    for entry in sorted(entries, key=lambda one: order.index(one.series)):
        place = variants[entry.method].index(entry.series)
        shade = _SHADES[place % len(_SHADES)]
        if entry.origin in ("measured", "predicted") and entry.settings == "equal":
            shade += (1 - shade) * 0.35  # paler than the same series as published
        looks.setdefault(
            name_of(entry), OriginLook(colour=method_colour(entry.method), origin=entry.origin, shade=shade)
        )
    return looks


def _panels(entries: Sequence[Entry], order: Sequence[str]) -> tuple[list[Panel], int]:
    """Panels, those with published numbers first, and how many are left out."""
    found: dict[str, dict[tuple[int, int], list[dict[str, Any]]]] = {}
    theirs = {panel_name(entry) for entry in entries if entry.origin in ("published", "computed")}
    for entry in sorted(entries, key=lambda one: (panel_name(one) not in theirs,)):
        points = found.setdefault(panel_name(entry), {})
        points.setdefault((entry.at, order.index(name_of(entry))), []).append(_row(entry))
    panels = [
        Panel(title=title, points=[Point(series=order[place], seq_len=at, rows=rows)
                                   for (at, place), rows in sorted(points.items(), key=lambda item: item[0])])
        for title, points in found.items()
    ]  # fmt: skip
    return panels[:MAX_PANELS], max(0, len(panels) - MAX_PANELS)


def _row(entry: Entry) -> dict[str, Any]:
    """What a bar is drawn of: the values, and of a measured one what its whisker needs."""
    spread = ("step_seconds_median", "step_seconds_iqr", "step_seconds_low", "step_seconds_high",
              "step_seconds_by_round")  # fmt: skip
    row = dict.fromkeys(spread) | {name: (entry.row or {}).get(name) for name in spread}
    return row | {"status": entry.status} | dict(entry.values)


def _where(entry: Entry) -> str:
    return "" if entry.hardware == PUBLISHED_ROWS else gpu_text(entry.hardware)


def _notes(
    found: Beside, entries: Sequence[Entry], measure: Measure, panels: Sequence[Panel], left: int, predictor: str
) -> list[str]:
    origins = {entry.origin for entry in entries}
    library = found.figure.reference.startswith("burstattention")
    source = "the README of MayDomine/Burst-Attention" if library else f"the sheets and scripts of {ARTIFACT}"
    notes = [f"Hatched: published, read from {source} (single samples; the paper's own figures were not read)."]
    if "computed" in origins:
        notes.append("Crosses: computed here; no measurement is needed.")
    if "measured" in origins:
        notes.append("Solid: measured by this project, medians.")
        if measure.timed and (note := whisker_note([p.rows for panel in panels for p in panel.points])):
            notes.append(note)
    if "predicted" in origins:
        notes.append(f"Outlined: predicted ({predictor}).")
    for panel in panels:
        here = {_where(entry) for entry in entries if panel_name(entry) == panel.title} - {""}
        if len(here) > 1:
            notes.append(f"GPUs of several kinds share the panel {panel.title}: {', '.join(sorted(here))}.")
    if left:
        notes.append(f"{left} more panels are in the table alone.")
    if found.figure.note:
        notes.append(found.figure.note)
    return notes
