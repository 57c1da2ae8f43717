"""Speed against memory, one panel per length: the engine's own frontier as one line, other systems as points.

The frontier joins the engine's trials that no other of them beats in memory without being slower, or in speed without
needing more memory; filled ones are those that the planner chose. Every other system has one point per trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from harness.base.lengths import format_length
from harness.metrics.throughput import FORMULAS
from harness.report.drawing.by_length import columns_of_panels
from harness.report.drawing.looks import INK, MUTED, line_key, looks_of, method_colour
from harness.report.drawing.notes import samples_note
from harness.report.drawing.points import about
from harness.report.drawing.sheet import SCREEN, Form, Sheet, in_both_forms, panel_title, sheet, value_axis
from harness.report.results import Row
from harness.report.variants import OWN_METHOD, series_of

MEMORY, SPEED = "peak_memory_gib", "tokens_per_gpu_per_second"


class SpeedMemory:
    title = "Speed against memory"
    place = 14

    def applies(self, rows: Sequence[Row]) -> bool:
        """Where the engine has several trials at one length, and another system or the planner has one there."""
        if rows[0]["task"] != "train":
            return False
        return any(
            len(_frontier(found)) > 1
            and any(row["method"] != OWN_METHOD or row.get("checkpoint.plan") == "auto" for row in found)
            for found in _panels(rows).values()
        )

    def draw(self, rows: Sequence[Row]) -> Sheet:
        notes = [
            "The line joins the engine's trials that no other of them beats in speed with less memory. Filled: chosen "
            "by the planner (checkpoint: auto) for a budget; hollow: set by hand.",
            f"P{FORMULAS[MEMORY][1:]}. {FORMULAS[SPEED]}.",
            samples_note(rows),
        ]
        return in_both_forms(partial(_draw, rows=rows, title=self.title, notes=[note for note in notes if note]))


def _panels(rows: Sequence[Row]) -> dict[tuple[int, int], list[Row]]:
    """Measured rows by ranks and length, both ascending."""
    found: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        if row.get(MEMORY) is not None and row.get(SPEED) is not None:
            found.setdefault((row["world_size"], row["seq_len"]), []).append(row)
    return dict(sorted(found.items()))


def _at(row: Row) -> tuple[float, float]:
    return float(row[MEMORY]), float(row[SPEED])


def _frontier(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Memory and speed of the engine's trials that no other of them beats, by memory."""
    best: list[tuple[float, float]] = []
    own = {_at(row) for row in rows if row["method"] == OWN_METHOD}
    for memory, speed in sorted(own, key=lambda at: (at[0], -at[1])):
        if not best or speed > best[-1][1]:
            best.append((memory, speed))
    return best


def _draw(form: Form, *, rows: Sequence[Row], title: str, notes: Sequence[str]) -> Sheet:
    panels = _panels(rows)
    others = series_of([row for row in rows if row["method"] != OWN_METHOD and row.get(SPEED) is not None], [])
    looks = looks_of(others)
    colour = method_colour(OWN_METHOD)
    own: dict[str, Any] = {"color": colour, "linewidth": 1.6, "marker": "o", "markersize": 5}
    legend: list[Artist] = [Line2D([], [], label=f"{OWN_METHOD}, its frontier", **own)]
    legend += [line_key(name, look, joined=False) for name, look in looks.items()]
    wide = (5.6 if len(panels) == 1 else 3.3) if form is SCREEN else (2.7 if len(panels) == 1 else 2.0)
    columns = columns_of_panels([wide] * len(panels), form)
    figure, axes = sheet(
        form,
        rows=-(-len(panels) // columns),
        widths=[wide] * columns,
        height=3.4 if form is SCREEN else 2.1,
        title=title,
        about=about(rows),
        notes=notes,
        legend=legend,
        sharey="none",
    )
    cells = [ax for line in axes for ax in line]
    for ax in cells[len(panels) :]:
        ax.set_visible(False)
    several_sizes = len({ranks for ranks, _ in panels}) > 1
    for index, (ax, ((ranks, seq_len), found)) in enumerate(zip(cells, panels.items(), strict=False)):
        _draw_panel(ax, found, own)
        for name, members in others:
            at = [_at(row) for row in members if any(row is one for one in found)]
            if at:
                ax.plot(*zip(*at, strict=True), zorder=4, **looks[name].point)
        words = f"{format_length(seq_len)} tokens" + (f", {ranks} ranks" if several_sizes else "")
        panel_title(ax, words, wide, form)
        if index + columns >= len(panels):
            ax.set_xlabel("peak memory (GiB per GPU)", fontsize=form.label, color=MUTED)
        if index % columns == 0:
            ax.set_ylabel("tokens/s per GPU", fontsize=form.label, color=INK)
    return figure


def _draw_panel(ax: Axes, rows: Sequence[Row], own: dict[str, Any]) -> None:
    """The engine's frontier, and all of its trials; both axes begin at 0, so that distances are shares."""
    value_axis(ax, [_at(row)[0] for row in rows], across=True)
    value_axis(ax, [_at(row)[1] for row in rows], across=False)
    ax.grid(axis="x", color=ax.get_ygridlines()[0].get_color(), linewidth=0.8)
    if frontier := _frontier(rows):
        ax.plot(*zip(*frontier, strict=True), color=own["color"], linewidth=own["linewidth"], zorder=2)
    for row in rows:
        if row["method"] == OWN_METHOD:
            filled = own["color"] if row.get("checkpoint.plan") == "auto" else "white"
            ax.plot(
                *_at(row), linestyle="none", marker=own["marker"], markersize=own["markersize"], markerfacecolor=filled,
                markeredgecolor=own["color"], markeredgewidth=1.1, zorder=3,
            )  # fmt: skip


FIGURE = SpeedMemory()
