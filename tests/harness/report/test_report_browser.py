"""Pages of reports in a real browser: sorting, filter, groups, commands, themes and widths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.probing.verdict import Verdict
from cluster.render.html import heat_map, html_page
from harness.report.page import write_report
from harness.report.site import write_site
from tests.browser import Browser, chromium
from tests.cluster.render.test_report_forms import OK, many, report
from tests.harness.report.test_report import run_of
from tests.harness.synthetic_records import gpu_sweep, record
from tests.slow import slow

pytestmark = pytest.mark.slow  # a browser takes as much time as two hundred tests

HOSTILE = "<img src=x onerror=console.log(1)><script>console.log(2)</script>"
TABLE = "document.querySelector('#results table')"
SHOWN = f"[...{TABLE}.tBodies[0].rows]"
PLACE = f"[...{TABLE}.tHead.rows[0].cells].findIndex(cell => cell.textContent.trim() === '%s')"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program, reason = chromium()
    if program is None:
        pytest.skip(reason)
    with Browser(program) as started:
        yield started


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of two runs; in one a trial failed for a reason that tries to run a script."""
    root = tmp_path_factory.mktemp("runs")
    command = ["burst", "run", "quickstart.yaml"]
    sweep = [replace(one, run_command=command) for one in gpu_sweep()]
    failed = record(status="failed", reason=HOSTILE, title=HOSTILE, seq_len=512)
    run_of(root / "sweep", [*sweep, replace(failed, run_command=command)])
    run_of(root / "other", [record()])
    write_site(root, root, {"html", "csv", "pdf"})
    return root


def column(browser: Browser, header: str) -> list[str]:
    """Texts of one column of the table of all trials, rows that are shown."""
    texts = browser.value(f"{SHOWN}.map(row => row.cells[{PLACE % header}].textContent.trim())")
    assert isinstance(texts, list)
    return texts


def press_header(browser: Browser, header: str) -> str | None:
    """Sort by a column with the keyboard; what the header then says to a screen reader."""
    cell = f"{TABLE}.tHead.rows[0].cells[{PLACE % header}]"
    browser.value(f"({cell}.querySelector('[tabindex]') ?? {cell}).focus()")
    browser.press("Enter", 13)
    browser.value("new Promise(done => setTimeout(done, 50))")  # rows are sorted in a task of their own
    direction: str | None = browser.value(f"{cell}.getAttribute('aria-sort')")
    return direction


def test_the_keyboard_sorts_numbers_by_value_and_the_third_press_restores_the_order(browser, site):
    browser.open(site / "sweep" / "report.html")
    before = column(browser, "step ms")
    assert press_header(browser, "step ms") == "ascending"
    numbers = [float(text.replace(",", "")) for text in column(browser, "step ms") if text]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 5
    assert column(browser, "step ms")[-1] == ""  # a trial without a number comes last
    assert press_header(browser, "step ms") == "descending"
    numbers = [float(text.replace(",", "")) for text in column(browser, "step ms") if text]
    assert numbers == sorted(numbers, reverse=True)
    assert column(browser, "step ms")[-1] == ""
    assert press_header(browser, "step ms") is None
    assert column(browser, "step ms") == before
    assert browser.complaints == []


def test_sorting_keeps_equal_rows_in_their_order(browser: Browser, site: Path) -> None:
    browser.open(site / "sweep" / "report.html")
    train = [tokens for tokens, task in zip(column(browser, "tokens"), column(browser, "task"), strict=True)
             if task == "train"]  # fmt: skip
    press_header(browser, "task")
    assert column(browser, "task") == sorted(column(browser, "task"))
    assert column(browser, "tokens")[-len(train) :] == train


def test_the_filter_shows_rows_with_all_words_and_counts_them(browser: Browser, site: Path) -> None:
    browser.open(site / "sweep" / "report.html")
    everything = len(column(browser, "method"))
    browser.value(
        "(field => { field.value = 'ULYSSES 32k'; field.dispatchEvent(new Event('input')); "
        "return new Promise(done => setTimeout(done, 600)); })(document.querySelector('#results input'))"
    )
    shown = column(browser, "method")
    assert 0 < len(shown) < everything
    assert all("ulysses" in name for name in shown)
    assert set(column(browser, "tokens")) == {"32k"}
    count = browser.value("document.querySelector('#results .dt-info').textContent")
    assert count == f"{len(shown)} rows of {everything}"


def test_groups_of_columns_are_hidden_and_shown(browser: Browser, site: Path) -> None:
    browser.open(site / "sweep" / "report.html")
    headers = f"[...{TABLE}.tHead.rows[0].cells].map(cell => cell.textContent.trim())"
    press = "[...document.querySelectorAll('#results .dt-button')].find(b => b.textContent === '%s').click()"
    assert "commit" not in browser.value(headers)
    assert {"tok/s/GPU", "peak GiB"} <= set(browser.value(headers))
    for name in ("provenance", "speed"):
        browser.value(press % name)
    assert "commit" in browser.value(headers)
    assert "tok/s/GPU" not in browser.value(headers)
    pressed = "[...document.querySelectorAll('#results .dt-button[aria-pressed=true]')].map(b => b.textContent)"
    assert {"provenance", "time"} <= set(browser.value(pressed))
    assert "speed" not in browser.value(pressed)


def test_a_command_is_copied_and_shown_where_there_is_no_clipboard(browser: Browser, site: Path) -> None:
    browser.open(site / "sweep" / "report.html")
    browser.value(
        "Object.defineProperty(navigator, 'clipboard', {configurable: true, "
        "value: {writeText: async text => { window.written = text; }}})"
    )
    press = "document.querySelector('#results button.copy').click()"
    browser.value(f"{press}; new Promise(done => setTimeout(done, 50))")
    assert browser.value("window.written").startswith("burst run quickstart.yaml --only ")
    assert browser.value("document.querySelector('#results details.command').hidden")
    browser.value("Object.defineProperty(navigator, 'clipboard', {configurable: true, value: undefined})")
    browser.value(f"{press}; new Promise(done => setTimeout(done, 50))")
    assert browser.value("document.querySelector('#results details.command').open")
    assert browser.value("getSelection().toString()").startswith("burst run quickstart.yaml --only ")


def test_text_of_records_runs_no_script_and_the_policy_holds_back_what_is_injected(browser, site):
    for page in (site / "sweep" / "report.html", site / "index.html"):
        browser.open(page)
        assert browser.complaints == []
        assert HOSTILE in browser.value("document.body.textContent")
    browser.value("document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))")
    assert browser.value("window.ran === undefined")


@pytest.mark.parametrize("width", [390, *slow(1280)])
@pytest.mark.parametrize("page", ["index.html", "sweep/report.html", "other/report.html"])
def test_no_page_scrolls_sideways(browser: Browser, site: Path, page: str, width: int) -> None:
    browser.open(site / page, width=width, height=844)
    assert browser.value(OVERFLOW) == 0
    browser.value("for (const part of document.querySelectorAll('details')) part.open = true")
    assert browser.value(OVERFLOW) == 0


def test_the_page_of_nodes_fits_a_phone_and_shows_faults_until_asked_for_all(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    long = Verdict(level="fail", summary="/a/path/without/any/space" * 12)
    speeds = {frozenset((f"gpu{one:02}", f"gpu{other:02}")): 40.0 for one in range(20) for other in range(one)}
    matrix = heat_map("GB/s", [f"gpu{number:02}" for number in range(20)], speeds, 40.0)
    page.write_text(html_page([*many(64), report("gpu99", disk=long, xid=OK)], [matrix]))
    for width in (360, 1280):
        browser.open(page, width=width, height=800, script=False)
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.value("document.documentElement.innerText.includes('gpu[01-64]')")
        assert not browser.value("document.querySelector('main').innerText.includes('gpu33')")
        browser.value("document.getElementById('faults').click()")
        assert browser.value("document.querySelector('main').innerText.includes('gpu33')")
    assert browser.complaints == []


def test_the_contents_stay_beside_the_page_on_a_laptop_and_fold_on_a_phone(browser: Browser, site: Path) -> None:
    box = "document.querySelector('%s').getBoundingClientRect()"
    browser.open(site / "sweep" / "report.html")
    browser.value("window.scrollTo(0, 2000)")
    assert browser.value(f"{box % '.side'}.top") >= 0
    assert browser.value(f"{box % '.top'}.height") == 0
    browser.open(site / "sweep" / "report.html", width=390)
    assert browser.value(f"{box % '.side'}.height") == 0
    assert not browser.value("document.querySelector('.top').open")
    missing = (
        "[...document.querySelectorAll('.top a[href^=\"#\"]')].filter(a => !document.querySelector(a.hash)).length"
    )
    assert browser.value(missing) == 0
    assert browser.value("document.querySelectorAll('.top a[href^=\"#\"]').length") > 4


def test_header_and_first_column_stay_while_a_table_scrolls(browser: Browser, site: Path) -> None:
    browser.open(site / "sweep" / "report.html", width=390, height=844)
    box = "document.querySelector('#results .box')"
    browser.value(f"{box}.scrollTo(300, 500)")
    assert browser.value(f"{box}.scrollLeft") > 100
    left = f"{TABLE}.rows[20].cells[0].getBoundingClientRect().left - {box}.getBoundingClientRect().left"
    top = f"{TABLE}.rows[0].cells[0].getBoundingClientRect().top - {box}.getBoundingClientRect().top"
    assert abs(browser.value(left)) < 2
    assert abs(browser.value(top)) < 2


def test_the_dark_theme_is_dark_and_so_are_figures(browser: Browser, site: Path) -> None:
    colour = "getComputedStyle(document.querySelector('%s')).%s"
    seen = []
    for dark in (False, True):
        browser.open(site / "sweep" / "report.html", dark=dark)
        shown = (("body", "backgroundColor"), ("body", "color"), ("figure .wide text", "fill"))
        seen.append([browser.value(colour % one) for one in shown])
    assert seen[0][:2] == ["rgb(255, 255, 255)", "rgb(29, 33, 39)"]
    assert seen[1][:2] == ["rgb(21, 24, 28)", "rgb(228, 231, 235)"]
    assert seen[1][2] in ("rgb(228, 231, 235)", "rgb(162, 171, 182)")


@pytest.mark.parametrize("width", [390, *slow(1280)])
def test_the_first_screen_is_the_verdict_and_the_plot_with_every_verdict_beside_its_dot(browser, site, width):
    browser.open(site / "sweep" / "report.html", width=width)
    rows = "[...document.querySelectorAll('.dots tbody tr')]"
    boxes = browser.value(
        f"{rows}.map(row => [...row.cells].filter(cell => cell.textContent.trim()).map(cell => "
        "(box => [box.left, box.right])(cell.getBoundingClientRect())))"
    )
    assert all(0 <= left < right <= width for row in boxes for left, right in row)
    assert browser.value("document.querySelector('p.verdict').getBoundingClientRect().bottom") < 400
    words = browser.value(f"{rows}.map(row => row.querySelector('.verdict')?.textContent)")
    assert any("not distinguishable" in (text or "") for text in words)
    assert browser.value(f"{rows}[0].querySelector('svg title').textContent").startswith("burst")


def test_without_scripts_every_row_and_every_command_can_be_read(browser: Browser, tmp_path: Path) -> None:
    one = replace(record(), run_command=["burst", "run", "x.yaml"])
    page = write_report([run_of(tmp_path / "r", [one])], tmp_path / "out", {"html"})
    browser.open(page, script=False)
    root = browser.document()
    assert root.count('<details class="command">') == 1
    assert 'hidden=""' not in root
    assert f"burst run x.yaml --only {one.trial_id}" in root
