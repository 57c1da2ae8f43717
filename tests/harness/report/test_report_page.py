"""The page as a value: cut tables, links and commands, the policy that allows one script, contrast of its colours."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.base.errors import UsageError
from harness.report import html
from harness.report.html import MAX_ROWS, TEMPLATES, Addresses, command_of, grid_of
from harness.report.page import write_report
from harness.report.results import rows_of
from harness.report.tables.table import Column, Table
from tests.harness.report.test_report import Page, run_of
from tests.harness.synthetic_records import cpu_sweep, record

# Text and the colour behind it.
READ = [(ink, behind) for behind in ("ground", "panel", "marked")
        for ink in ("ink", "muted", "accent", "good", "warn", "bad")]  # fmt: skip


def colours(theme: str) -> dict[str, str]:
    """Custom properties of the style, in one theme."""
    light, dark = re.findall(r":root \{(.*?)\}", (TEMPLATES / "style.css").read_text(), re.DOTALL)[:2]
    found = dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", light))
    return found | dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", dark)) if theme == "dark" else found


def luminance(colour: str) -> float:
    """Relative luminance of an sRGB colour, as WCAG 2.2 defines it."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_has_a_contrast_of_at_least_four_and_a_half(theme: str) -> None:
    colour = colours(theme)
    low = {}
    for ink, behind in READ:
        dim, bright = sorted((luminance(colour[ink]), luminance(colour[behind])))
        if (contrast := (bright + 0.05) / (dim + 0.05)) < 4.5:
            low[ink, behind] = round(contrast, 2)
    assert low == {}
    assert colours("light")["ground"] != colours("dark")["ground"]


def test_the_policy_allows_the_pages_own_script_and_style_by_their_digests(tmp_path: Path) -> None:
    text = write_report([run_of(tmp_path / "r", [record()])], tmp_path / "out", {"html"}).read_text()
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    policy = policy.replace("&#39;", "'")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        [inside] = re.findall(f'<{tag}(?: type="module")?>(.*?)</{tag}>', text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"\son\w+=|\sstyle=", re.sub(r"<script.*</script>", "", text, flags=re.DOTALL))


def test_without_the_package_that_sorts_tables_the_page_has_every_row(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "find_spec", lambda _: None)
    html._assets.cache_clear()
    try:
        text = write_report([run_of(tmp_path / "r", [record()])], tmp_path / "out", {"html"}).read_text()
    finally:
        html._assets.cache_clear()
    assert "const TableLibrary = null;" in text
    assert len(text) < 100_000  # the library alone is larger
    assert "All trials" in Page(text).text


def test_a_table_of_many_rows_is_cut_and_says_where_the_rest_is(tmp_path: Path) -> None:
    table = Table(
        name="many", title="Many", columns=(Column(header="n", numeric=True),),
        rows=tuple((number,) for number in range(MAX_ROWS + 1)),
    )  # fmt: skip
    grid = grid_of(table, Addresses(tmp_path), tmp_path / "tables" / "many.csv")
    assert (len(grid.lines), grid.total, grid.csv) == (MAX_ROWS, MAX_ROWS + 1, "tables/many.csv")
    records = [record(seed=seed) for seed in range(MAX_ROWS + 1)]
    folder = run_of(tmp_path / "r", records)
    page = Page(write_report([folder], tmp_path / "out", {"html", "csv"}).read_text())
    assert f"The first {MAX_ROWS} of {MAX_ROWS + 1} rows; all of them are in the CSV file ." in page.text
    assert len((tmp_path / "out" / "tables" / "results.csv").read_text().splitlines()) == MAX_ROWS + 2
    page = Page(write_report([folder], tmp_path / "other", {"html"}).read_text())
    assert "burst report --format html,csv writes all of them" in page.text


def test_a_row_has_the_command_of_its_run_for_its_trial_alone() -> None:
    [row] = rows_of([replace(record(), run_command=["burst", "run", "my file.yaml"])])
    assert command_of(row) == f"burst run 'my file.yaml' --only {row['trial_id']}"
    assert command_of(rows_of([record()])[0]) == ""


def test_only_files_that_this_report_wrote_are_linked(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "r", [record(), record(method="ring")])
    write_report([folder], tmp_path / "out")
    links = Page((write_report([folder], tmp_path / "out", {"html", "pdf"})).read_text()).links
    kinds = {Path(link).suffix for link in links if not link.startswith(("data:", "#"))}
    assert kinds == {".pdf", ".json"}


def test_record_links_of_a_report_elsewhere_lead_to_the_run_and_back(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "a run", [record()])
    out = tmp_path / "out"
    links = [link for link in Page(write_report([folder], out, {"html"}).read_text()).links if "record" in link]
    assert links == [f"../a%20run/trials/{record().trial_id}/record.json"]


def test_cells_sort_by_all_digits_and_an_absent_one_by_nothing() -> None:
    columns = (Column(header="n", form="{:.1f}".format, numeric=True), Column(header="of"))
    grid = grid_of(Table(name="t", title="", columns=columns, rows=((1e-9, "abc"), (None, "a"))), Addresses(Path()))
    assert [[cell.order for cell in line.cells] for line in grid.lines] == [["1e-09", "abc"], ["", "a"]]


def test_figures_of_a_page_share_no_id(tmp_path: Path) -> None:
    text = write_report([run_of(tmp_path / "r", cpu_sweep())], tmp_path / "out", {"html"}).read_text()
    ids = re.findall(r'<[^>]*\sid="([^"]+)"', re.sub(r"<script.*</script>", "", text, flags=re.DOTALL))
    assert len(ids) == len(set(ids)) > 20


def test_a_hostile_name_of_a_method_cannot_leave_its_cell(tmp_path: Path) -> None:
    hostile = '"><script>alert(1)</script>'
    one = replace(record(reason=hostile, status="failed"), gpu=hostile, hosts=[hostile], title=hostile)
    one.settings = replace(one.settings, method=hostile)
    try:
        page = Page(write_report([run_of(tmp_path / "r", [one])], tmp_path / "out", {"html"}).read_text())
    except UsageError as error:
        pytest.fail(str(error))
    assert page.tags.count("script") == 1
    assert hostile in page.text
