"""What a reader finds in a figure: its SVG read back, for tests of figures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

from harness.report.drawing.sheet import Sheet
from harness.report.figures import all_figures, render
from harness.report.results import Row

SVG = "{http://www.w3.org/2000/svg}"


def sheet_of(name: str, rows: Sequence[Row]) -> Sheet:
    """The figure of this name, which the rows must have."""
    shown = all_figures()[name].draw(rows)
    assert isinstance(shown, Sheet), shown
    return shown


def texts(sheet: Sheet) -> list[str]:
    """Every line of text of its SVG file."""
    tree = ElementTree.fromstring(render(sheet, "svg"))
    return ["".join(element.itertext()) for element in tree.iter(f"{SVG}text")]


def said(sheet: Sheet) -> str:
    """All text of its SVG file in one line."""
    return " ".join(" ".join(texts(sheet)).split())


def tips(sheet: Sheet) -> list[str]:
    """What marks show on hover, in the order in which they are drawn."""
    tree = ElementTree.fromstring(render(sheet, "svg"))
    return [str(element.text) for element in tree.iter(f"{SVG}title")]
