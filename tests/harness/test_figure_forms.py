"""The forms a figure is written in: PDFs for papers, SVG and PNG for screens."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import pytest
from matplotlib.text import Text

from harness.report.drawing.sheet import COLUMN_INCHES, PAGE_INCHES, Sheet
from harness.report.figures import all_figures, render, save_figure
from harness.report.results import Row, rows_of
from tests.harness.synthetic_records import cpu_sweep, gpu_sweep, levers, record, traced

LEAST_POINTS = 7
NARROW = rows_of([record(), record(method="ring", seconds=0.3)])
METHODS = ("burst", "ring", "ulysses", "megatron_cp")
WIDE = rows_of([record(cp_size=cp_size, method=method) for cp_size in (1, 2, 4) for method in METHODS])


@cache
def all_sheets() -> list[tuple[str, Sheet, Sheet]]:
    """Figures of every kind in both forms, for screens and for papers."""
    groups: list[list[Row]] = [rows_of(levers()), rows_of([traced(), traced(method="ring")]), rows_of([traced()])]
    groups += [[row for row in rows_of(gpu_sweep()) if row["task"] == "train"]]
    groups += [[row for row in rows_of(cpu_sweep()) if row["task"] == "attention"]]
    sheets = []
    for rows in groups:
        for name, drawing in all_figures().items():
            if drawing.applies(rows):
                figure = drawing.draw(rows)
                assert isinstance(figure, Sheet), name
                assert figure.for_paper is not None, name
                sheets.append((name, figure, figure.for_paper()))
    return sheets


def width_inches(pdf: bytes) -> float:
    box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+) ?\]", pdf)
    assert box is not None
    return float(box[1]) / 72


@pytest.mark.parametrize("rows", [NARROW, WIDE], ids=["narrow", "wide"])
def test_a_pdf_has_truetype_fonts_and_the_width_of_a_column_or_a_page(rows: list[Row]) -> None:
    pdf = render(all_figures()["throughput"].draw(rows), "pdf")
    assert b"/Subtype /Type3" not in pdf
    assert b"/Subtype /TrueType" in pdf or b"/Subtype /CIDFontType2" in pdf
    assert b"/FontFile2" in pdf  # embedded
    assert width_inches(pdf) == pytest.approx(COLUMN_INCHES if rows is NARROW else PAGE_INCHES, abs=0.01)


def test_papers_get_every_figure_without_title_and_notes_in_readable_letters() -> None:
    assert {name for name, _, _ in all_sheets()} == set(all_figures()) - {"lm_head_speed", "speed_memory"}
    for name, figure, paper in all_sheets():
        assert paper.get_figwidth() in (COLUMN_INCHES, PAGE_INCHES), name
        assert not paper.texts, name  # title, set-up and notes of the screen's form
        shown = [text for text in paper.findobj(Text) if text.get_text() and text.get_visible()]
        assert min(text.get_fontsize() for text in shown) >= LEAST_POINTS, name
        assert len(figure.texts) == 3, name
        for text in figure.texts:
            assert " ".join(text.get_text().split()).rstrip(".") in figure.caption.replace("..", "."), name


def test_nothing_of_a_figure_for_papers_lies_outside_its_sheet() -> None:
    for name, _, paper in all_sheets():
        paper.draw_without_rendering()
        unseen = {
            tick.label1
            for ax in paper.axes
            for axis in (ax.xaxis, ax.yaxis)
            for tick in axis.get_major_ticks()
            if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        }
        for text in paper.findobj(Text):
            if text.get_text().strip() and text.get_visible() and text not in unseen:
                box = text.get_window_extent()
                assert box.x0 > -2, (name, text.get_text())
                assert box.x1 < paper.bbox.x1 + 2, (name, text.get_text())
                assert -2 < box.y0 < box.y1 < paper.bbox.y1 + 2, (name, text.get_text())


def test_the_caption_lies_beside_the_pdf_as_latex(tmp_path: Path) -> None:
    written = save_figure(all_figures()["throughput"].draw(NARROW), tmp_path / "throughput", ["pdf"])
    assert {path.name for path in written} == {"throughput.pdf", "throughput.tex"}
    latex = (tmp_path / "throughput.tex").read_text()
    assert r"\includegraphics[width=3.35in]{throughput.pdf}" in latex
    assert r"\caption{Training throughput. model small" in latex
    assert "in one round" in latex
    assert latex.startswith("\\begin{figure}\n")
    save_figure(all_figures()["throughput"].draw(WIDE), tmp_path / "wide", ["pdf"])
    assert (tmp_path / "wide.tex").read_text().startswith("\\begin{figure*}\n")


def test_an_svg_keeps_its_text_and_brings_its_own_white_plate() -> None:
    """So that it is read in a dark page too, and a changed number shows in a diff."""
    svg = render(all_figures()["throughput"].draw(NARROW), "svg")
    tree = ElementTree.fromstring(svg)
    words = {"".join(element.itertext()) for element in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Training throughput", "tokens/s per rank", "1k"} <= words
    plate = tree.find(".//*[@id='patch_1']/{http://www.w3.org/2000/svg}path")
    assert plate is not None
    assert "fill: #ffffff" in plate.attrib["style"]
    assert len(svg) < 40_000


def test_a_form_is_laid_out_alike_whatever_was_written_before() -> None:
    draw = all_figures()["throughput"].draw
    figure = draw(NARROW)
    render(figure, "png")
    assert render(figure, "svg") == render(draw(NARROW), "svg")
