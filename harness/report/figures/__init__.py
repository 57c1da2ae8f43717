"""Figures: one file each, found by file name.

A figure chooses columns and draws them. It derives no number and reads no record.
"""

from __future__ import annotations

import importlib
import io
import pkgutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from matplotlib import rc_context
from matplotlib.figure import Figure

from engine.atomic import write_atomic
from harness.report.results import Row

FORMATS = ("png", "pdf", "svg")


class Drawing(Protocol):
    """What a module of this package defines as `FIGURE`. All rows given to it belong to one set-up
    (`harness.report.variants.setup_of`): one run, one task, one model."""

    title: str
    place: int  # reading order in reports, smallest first

    def applies(self, rows: Sequence[Row]) -> bool:
        """Whether these rows hold at least one number to draw."""
        ...

    def draw(self, rows: Sequence[Row]) -> Figure:
        """Draw all rows; one without a number is shown by its status."""
        ...


def all_figures() -> dict[str, Drawing]:
    """Every figure under its file name, in reading order. Modules that start with an underscore are helpers."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    found: dict[str, Drawing] = {name: importlib.import_module(f"{__name__}.{name}").FIGURE for name in names}
    return dict(sorted(found.items(), key=lambda item: (item[1].place, item[0])))


def render(figure: Figure, kind: str) -> bytes:
    """The figure as png, pdf or svg bytes; equal figures give equal bytes, so committed plots change only with data."""
    assert kind in FORMATS, kind
    buffer = io.BytesIO()
    dated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with rc_context({"svg.hashsalt": "burst"}):  # else the ids inside an SVG are random
        figure.savefig(buffer, format=kind, dpi=160, metadata=dated.get(kind))
    return buffer.getvalue()


def save_figure(figure: Figure, stem: Path, kinds: Iterable[str]) -> list[Path]:
    """Write `stem`.png, `stem`.pdf ... whole or not at all."""
    return [write_atomic(stem.with_name(f"{stem.name}.{kind}"), render(figure, kind)) for kind in sorted(kinds)]
