"""Speed against memory, one panel per length: the engine's own frontier as one line, other systems as points.

A frontier is made of the trials of one system that no other of them beats in memory without being slower, or in speed
without needing more memory. Of the engine's, filled points are those that the planner chose.
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
from harness.report.drawing.points import IN_CSV, MAX_PANELS, about
from harness.report.drawing.sheet import SCREEN, Form, Sheet, in_both_forms, panel_title, sheet, value_axis
from harness.report.results import Row, method_rank
from harness.report.variants import OWN_METHOD

MEMORY, SPEED = "peak_memory_gib", "tokens_per_gpu_per_second"


class SpeedMemory:
    title = "Speed against memory"
    place = 14

    def applies(self, rows: Sequence[Row]) -> bool:
        """Where the engine has several trials at one length, and another system or the planner has one there."""
        if rows[0]["task"] != "train":
            return False
        return any(
            len(_frontier(found, OWN_METHOD)) > 1
            and any(row["method"] != OWN_METHOD or row.get("checkpoint.plan") == "auto" for row in found)
            for found in _panels(rows).values()
        )

    def draw(self, rows: Sequence[Row]) -> Sheet:
        notes = [
            "The line joins the engine's trials that no other of them beats in speed with less memory. Filled: chosen "
            "by the planner (checkpoint: auto) for a budget; hollow: set by hand. Trials that another of the same "
            f"system beats in both have no point; {IN_CSV}.",
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


def _frontier(rows: Sequence[Row], method: str) -> list[Row]:
    """Trials of a method that no other of its own beats, by memory."""
    best: list[Row] = []
    for row in sorted((row for row in rows if row["method"] == method), key=lambda row: (row[MEMORY], -row[SPEED])):
        if not best or row[SPEED] > best[-1][SPEED]:
            best.append(row)
    return best


def _draw(form: Form, *, rows: Sequence[Row], title: str, notes: Sequence[str]) -> Sheet:
    panels = dict(list(_panels(rows).items())[-MAX_PANELS:])  # the longest of the most ranks say most
    shown = [row for found in panels.values() for row in found]
    others = [method for method in sorted({row["method"] for row in shown}, key=method_rank) if method != OWN_METHOD]
    looks = looks_of([(method, [row for row in shown if row["method"] == method]) for method in others])
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
        for method in others:
            if at := [_at(row) for row in _frontier(found, method)]:
                ax.plot(*zip(*at, strict=True), zorder=4, **looks[method].point)
        words = f"{format_length(seq_len)} tokens" + (f", {ranks} ranks" if several_sizes else "")
        panel_title(ax, words, wide, form)
        if index + columns >= len(panels):
            ax.set_xlabel("peak memory (GiB per GPU)", fontsize=form.label, color=MUTED)
        if index % columns == 0:
            ax.set_ylabel("tokens/s per GPU", fontsize=form.label, color=INK)
    return figure


def _draw_panel(ax: Axes, rows: Sequence[Row], own: dict[str, Any]) -> None:
    """The engine's frontier, its points filled where the planner chose them."""
    value_axis(ax, [_at(row)[0] for row in rows], across=True)
    value_axis(ax, [_at(row)[1] for row in rows], across=False)
    ax.grid(axis="x", color=ax.get_ygridlines()[0].get_color(), linewidth=0.8)
    frontier = _frontier(rows, OWN_METHOD)
    if frontier:
        ax.plot(*zip(*map(_at, frontier), strict=True), color=own["color"], linewidth=own["linewidth"], zorder=2)
    for planned in (True, False):
        at = [_at(row) for row in frontier if (row.get("checkpoint.plan") == "auto") is planned]
        if at:
            ax.plot(
                *zip(*at, strict=True), linestyle="none", marker=own["marker"], markersize=own["markersize"],
                markerfacecolor=own["color"] if planned else "white", markeredgecolor=own["color"],
                markeredgewidth=1.1, zorder=3,
            )  # fmt: skip


FIGURE = SpeedMemory()
