"""The forms a figure is written in: files for screens and papers, elements of a page, light and dark."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import pytest
from matplotlib.text import Text

from harness.report.drawing.looks import PALETTE, palette_css
from harness.report.drawing.sheet import COLUMN_INCHES, NARROW, SCREEN, WIDE, FigureSize, Sheet, text_inches, wrapped
from harness.report.figures import all_figures, inline, render, save_figure, shown_of
from harness.report.results import Row, rows_of
from tests.harness.report.figures.drawn import SVG, sheet_of
from tests.harness.synthetic_records import cpu_sweep, gpu_sweep, levers, record, traced, with_memory

LEAST_POINTS = 6
PAIR = rows_of([record(), record(method="ring", seconds=0.3)])


@cache
def all_sheets() -> list[tuple[str, Sheet]]:
    """Figures of every kind."""
    groups: list[list[Row]] = [rows_of(levers()), rows_of([traced(), traced(method="ring")]), rows_of([traced()])]
    groups += [[row for row in rows_of(gpu_sweep()) if row["task"] == task] for task in ("train", "attention")]
    groups += [[row for row in rows_of(cpu_sweep()) if row["task"] == "attention"]]
    groups += [rows_of([record(), record(method="ring", drift=1e-2)])]
    apart = rows_of([with_memory(10 * n, 1.0, method=name, cp_size=2) for n, name in ((1, "burst"), (2, "ring"))])
    apart[1]["sent_gib_per_gpu"] *= 2
    groups += [apart]
    return [(name, one) for rows in groups for name, one in shown_of(rows).items() if isinstance(one, Sheet)]


def test_a_pdf_has_truetype_fonts_and_the_width_of_a_column() -> None:
    pdf = render(sheet_of("speed", PAIR), "pdf")
    assert b"/Subtype /Type3" not in pdf
    assert b"/FontFile2" in pdf  # embedded
    box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+) ?\]", pdf)
    assert box is not None
    assert float(box[1]) / 72 == pytest.approx(COLUMN_INCHES, abs=0.01)


@pytest.mark.parametrize("form", [SCREEN, WIDE, NARROW], ids=["screen", "wide", "narrow"])
def test_no_letter_is_too_small_or_outside_the_figure(form: FigureSize) -> None:
    assert {name for name, _ in all_sheets()} == set(all_figures())
    for name, sheet in all_sheets():
        figure = sheet.drawn(form).figure
        figure.draw_without_rendering()
        for text in figure.findobj(Text):
            if text.get_text().strip() and text.get_visible():
                assert text.get_fontsize() >= LEAST_POINTS, (name, text.get_text())
                box = text.get_window_extent()
                if box.width and text.axes is not None and text in text.axes.texts:
                    assert box.x0 > -3, (name, text.get_text())
                    assert box.x1 < figure.bbox.x1 + 3, (name, text.get_text())
                    assert -3 < box.y0 < box.y1 < figure.bbox.y1 + 3, (name, text.get_text())


def test_title_set_up_and_notes_stand_in_files_and_not_in_the_elements_of_a_page() -> None:
    for name, sheet in all_sheets():
        assert len(sheet.drawn(SCREEN).figure.texts) > 2, name
        assert not sheet.drawn(WIDE).figure.texts, name
        assert not sheet.drawn(NARROW).figure.texts, name


def test_the_caption_lies_beside_the_pdf_as_latex(tmp_path: Path) -> None:
    written = save_figure(sheet_of("speed", PAIR), tmp_path / "speed", ["pdf"])
    assert {path.name for path in written} == {"speed.pdf", "speed.tex"}
    latex = (tmp_path / "speed.tex").read_text()
    assert r"\includegraphics[width=3.35in]{speed.pdf}" in latex
    assert r"\caption{Training: time of a step on the CPU. model small" in latex
    assert "in one round" in latex


def test_an_svg_file_keeps_its_text_and_follows_light_and_dark() -> None:
    svg = render(sheet_of("speed", PAIR), "svg")
    tree = ElementTree.fromstring(svg)
    assert {"burst", "ring"} <= {"".join(text.itertext()) for text in tree.iter(f"{SVG}text")}
    style = "".join(str(element.text) for element in tree.iter(f"{SVG}style"))
    assert "prefers-color-scheme:dark" in style
    for name, (light, dark) in PALETTE.items():
        assert f"--{name}:{light}" in style
        assert f"--{name}:{dark}" in style
    assert len(svg) < 20_000


def test_every_colour_of_an_svg_is_a_variable() -> None:
    for name, sheet in all_sheets():
        for element in ElementTree.fromstring(render(sheet, "svg")).iter():
            for attribute in ("fill", "stroke"):
                value = element.attrib.get(attribute, "none")
                assert value == "none" or value.startswith("var(--"), (name, element.tag, value)


def test_elements_of_a_page_hold_no_style_and_no_id_of_another_figure() -> None:
    sheet = sheet_of("speed", PAIR)
    found = [*inline(sheet, "one"), *inline(sheet, "two")]
    ids = [re.findall(r'\bid="([^"]+)"', svg) for svg in found]
    assert len({one for several in ids for one in several}) == sum(map(len, ids))
    for svg in found:
        assert svg.startswith("<svg")
        assert "style" not in svg
        assert "<script" not in svg
        assert "http" not in svg.replace("http://www.w3.org/", "")
        for reference in re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", svg):
            assert f'id="{reference}"' in svg
    assert "--burst:" in palette_css()
    assert "--ink:" not in palette_css()  # the page's own


def test_equal_data_gives_equal_bytes_whatever_was_written_before() -> None:
    for kind in ("png", "pdf", "svg"):
        first = sheet_of("speed", PAIR)
        render(first, "png")
        assert render(first, kind) == render(sheet_of("speed", PAIR), kind), kind


def test_files_are_whole_and_of_their_kind(tmp_path: Path) -> None:
    written = save_figure(sheet_of("speed", PAIR), tmp_path / "a.b", ["png", "pdf"])
    (png,) = [path for path in written if path.suffix == ".png"]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.b.pdf").read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b.pdf", "a.b.png", "a.b.tex"]


def test_text_is_wrapped_to_its_width_and_words_are_kept_whole() -> None:
    text = "burst is 1.10 to 1.16 times as fast as the best other system, 16K to 128K tokens"
    lines = wrapped(text, 2.0, 9)
    assert " ".join(lines) == text
    assert all(text_inches(line, 9) <= 2.0 for line in lines)
    assert wrapped("unbreakable", 0.1, 9) == ["unbreakable"]
