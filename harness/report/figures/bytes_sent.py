"""Bytes each GPU sends for attention in one step."""

from __future__ import annotations

from collections.abc import Sequence

from harness.metrics.throughput import FORMULAS
from harness.report.drawing.by_length import draw_by_length
from harness.report.drawing.points import Group, Measure, has_choice
from harness.report.drawing.sheet import Sheet
from harness.report.results import Row
from harness.report.variants import panel_of

COLUMN = "sent_gib_per_gpu"


class BytesSent:
    title = "Bytes sent by attention per step"
    place = 60

    def applies(self, rows: Sequence[Row]) -> bool:
        """Where what was chosen changes the bytes: how they grow with the length needs no figure."""
        sizes: dict[int, set[tuple[int, int, int]]] = {}
        for row in rows:
            if row[COLUMN]:
                sizes.setdefault(row["seq_len"], set()).add(panel_of(row))
        return has_choice(rows, COLUMN, 0.005) or any(len(found) > 1 for found in sizes.values())

    def draw(self, rows: Sequence[Row]) -> Sheet:
        most = max(row[COLUMN] or 0.0 for row in rows)
        unit, scale = ("GiB", 1.0) if most >= 1 else ("MiB", 1024.0) if most >= 1 / 1024 else ("KiB", 1024.0**2)
        sending = Group(row for row in rows if row["cp_size"] > 1)  # one rank sends nothing
        sending.note = getattr(rows, "note", "")
        return draw_by_length(
            sending,
            f"{self.title}, task {rows[0]['task']}",
            Measure(
                column=COLUMN,
                unit=f"{unit} per {'GPU' if any(row['peak_memory_gib'] for row in rows) else 'rank'} and step",
                scale=scale,
                notes=[f"S{FORMULAS[COLUMN][1:]}."],
            ),
        )


FIGURE = BytesSent()
