"""Measured numbers on the pages are those of the published records, written by `make docs` and not typed in by hand."""

from __future__ import annotations

import re
import statistics
import subprocess
from pathlib import Path

import matplotlib
import pytest

from harness.report.page import read_runs
from harness.report.quoted import Quotes, pages_of, quoted_names, rewritten

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "results" / "published"
PAGES = pages_of(ROOT)
RUNS = sorted({path.parents[2] for path in PUBLISHED.glob("*/*/trials/*/record.json")})


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def quotes() -> Quotes:
    return Quotes(ROOT)


@pytest.mark.parametrize("page", [page for page in PAGES if quoted_names(page.read_text("utf-8"))], ids=name)
def test_a_page_shows_the_numbers_of_the_published_records(page: Path, quotes: Quotes) -> None:
    text = page.read_text(encoding="utf-8")
    expected = rewritten(text, quotes)
    parted = [line for line in text.splitlines() if line not in expected.splitlines()]
    assert text == expected, f"run `make docs`; these lines differ from the records: {parted}"


def test_pages_quote_records_and_every_number_that_is_defined_is_quoted(quotes: Quotes) -> None:
    quoted = {one for page in PAGES for one in quoted_names(page.read_text("utf-8"))}
    assert {"million_share", "long_steps", "ring_share_64k"} <= quoted
    used_by_others = {
        word for number in quotes.definitions.numbers.values() for word in re.findall(r"[a-z]\w*", number.of)
    }
    assert set(quotes.names) - quoted - used_by_others == set()


def test_no_marker_on_a_page_is_left_open() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("<!--/-->") == len(quoted_names(text)), name(page)


def test_the_figures_of_the_pages_are_drawn_from_the_published_records(quotes: Quotes) -> None:
    assert quotes.definitions.drawings
    for path in quotes.definitions.drawings:
        drawn = (ROOT / path).read_bytes()
        if f"Matplotlib v{matplotlib.__version__},".encode() not in drawn:
            pytest.skip(f"{path} was drawn by another version of matplotlib, whose figures differ in their bytes")
        assert drawn == quotes.drawing(path), f"run `make docs`: {path} differs from the records"


def test_records_of_a_commit_in_no_history_are_marked_on_every_page_that_links_them() -> None:
    if subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, check=False).returncode:
        pytest.skip("not a git checkout, so no history to look commits up in")
    shallow = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]
    if subprocess.run(shallow, capture_output=True, text=True, check=True).stdout.strip() == "true":
        pytest.skip("a shallow checkout, which lacks most of the history")
    lost = [run for run in RUNS if not all(map(in_history, {record.commit for record in read_runs([run])[0]}))]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for run in lost:
            link = f"{run.parent.name}/{run.name}/"
            blocks = [block for block in re.split(r"\n(?=[|\n-])", text) if link in block]
            assert all("in no history" in block for block in blocks), f"{name(page)} links {link} without the mark"
            assert page.name != "README.md" or page.parent != ROOT or not blocks, "not on the first screen"


def test_the_middle_halves_of_the_steps_part_where_the_page_says_that_auto_leads_beyond_the_noise() -> None:
    page = (ROOT / "docs" / "attention-performance.md").read_text(encoding="utf-8")
    assert "at 64K with 32:32 heads and at 16K, 32K and 64K with 32:8 heads." in page
    assert "except at 256K with 32:8 heads" in page
    leads = set()
    for run in ("attention_node", "attention_node_grouped"):
        records, _ = read_runs([PUBLISHED / "h200x4" / run])
        steps: dict[int, dict[str, list[float]]] = {}
        for record in records:
            if record.settings.cp_size > 1 and record.measurement:
                steps.setdefault(record.settings.seq_len, {})[record.settings.method] = record.measurement.step_seconds
        for seq_len, by_method in steps.items():
            _, _, slow = statistics.quantiles(by_method.pop("burst"), n=4, method="inclusive")
            best = min(by_method.values(), key=statistics.median)
            if slow < statistics.quantiles(best, n=4, method="inclusive")[0]:
                leads.add((records[0].settings.model.kv_heads, seq_len >> 10))
    assert leads == {(32, 64), (8, 16), (8, 32), (8, 64), (8, 256)}


def in_history(commit: str) -> bool:
    """Whether the checkout's branch holds the commit; a changed tree's `-dirty` is not part of its name."""
    words = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", commit.split("-")[0], "HEAD"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0
