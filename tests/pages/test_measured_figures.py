"""Measured numbers on the pages are those of the published records, written by `make docs` and not typed in by hand."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from harness.pages import quotes_of
from harness.records.stored import runs_below
from harness.report.page import read_runs
from harness.report.quoted import Quotes, pages_of, quoted_names, rewritten

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "published"
PAGES = pages_of(ROOT)
RUNS = runs_below(PUBLISHED)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def quotes() -> Quotes:
    return quotes_of(ROOT)


@pytest.mark.parametrize("page", [page for page in PAGES if quoted_names(page.read_text("utf-8"))], ids=name)
def test_a_page_shows_the_numbers_of_the_published_records(page: Path, quotes: Quotes) -> None:
    text = page.read_text(encoding="utf-8")
    expected = rewritten(text, quotes)
    parted = [line for line in text.splitlines() if line not in expected.splitlines()]
    assert text == expected, f"run `make docs`; these lines differ from the records: {parted}"


def test_pages_quote_records_and_every_number_that_is_defined_is_quoted(quotes: Quotes) -> None:
    quoted = {one for page in PAGES for one in quoted_names(page.read_text("utf-8"))}
    assert {"million_share", "long_short", "ring_share_64k"} <= quoted
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
        assert _shown(path, (ROOT / path).read_bytes()) == _shown(path, quotes.drawing(path)), "run `make docs`"


def _shown(path: str, svg: bytes) -> tuple[str, list[tuple[str, str, str]], int]:
    """What a figure says, and where to the unit of the drawing; its bytes differ between versions of matplotlib."""
    text = svg.decode()
    placed = re.findall(r'<text x="(-?\d+)[^>]* y="(-?\d+)[^>]*>([^<]*)<', text)
    assert len(placed) > 10, path
    return path, placed, text.count("<path")


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
            link = f"{run.parent.name}/{run.name}"
            blocks = [block for block in re.split(r"\n(?=[|\n-])", text) if link in block]
            assert all("in no history" in block for block in blocks), f"{name(page)} links {link} without the mark"
            assert page.name != "README.md" or page.parent != ROOT or not blocks, "not on the first screen"


# Numbers that look measured: a ratio with its interval, a share, a time, memory, a speed. Pages whose numbers are all
# quoted, each with the words around those that nobody measured: hardware, settings, formulas, predictions, claims.
# A paragraph that says `development run` has no record.
_MEASURED = re.compile(
    r"\b\d+(?:\.\d+)? ?%|\b\d[\d,]*\.\d+ (?:\(\d|(?:to|and) \d[\d,]*\.\d+)"
    r"|\b\d[\d,]*(?:\.\d+)? (?:s|ms|seconds|GiB|MiB|GiB/s|TFLOP/s|tokens per second|times)\b"
)
_NOT_MEASURED = {
    "README.md": ["Ranges are 95% intervals over three rounds", "| a step that fits into 30 GiB |"],
    "results/published/README.md": ["a host with 128 GiB has"],
    "docs/attention.md": [
        "If layouts differ by at most 5%", "`query` sends 24% less, and 33% less",
    ],
    "docs/memory.md": [
        "the predicted step is 1% longer", "65% of the optimizer and gradients on the host", "starts at 40 GiB",
        "use 90% of its share", "is then predicted 0.4% slower", "only asked about (`--hardware`), 230 GiB",
        "they would take 63 GiB", "tiles of about 1 GiB",
        "predicted within 3%, and reserved within 10%", "took up to 18% more than predicted",
        "changes each product by 3% to 6% of its norm", "an error of 36%, and a factor of 4.5%; in bf16 5% and 1%",
    ],
    "docs/baselines.md": ["ran out of 125 GiB of host memory"],
    "docs/train.md": [
        "holds out the last 1% of tokens", "Under torchrun the ranks have 30 seconds", "(2, 3, 3.1 to 3.3)",
    ],
    "docs/plan.md": [
        "may use 227 GiB of host memory", "the answer is 37.1 s and 64 GiB",
        "tensors moved to the host, and 2 GiB for the process",
        "the predicted memory plus 4%", "It counts 10 seconds for the start of each trial",
        "the predicted time is 2 to 11 times too long",
    ],
    "docs/install.md": [],
    "docs/results.md": [
        "the fastest other below 28 GiB",
        'A range is a 95% interval over three rounds;\n"1.08 and 1.11" are two rounds'
    ],
    "docs/8b-at-128k.md": [
        "a peak of 989 TFLOP/s per GPU",
        "For a host of 125 GiB", "With 230 GiB all", "the prediction is 36.1 s, with 227 GiB on the host",
        "with `host_memory: 64GiB` 37.1 s, with 64 GiB there",
        "17.9 s (not measured)",
        "the prediction is 74 GiB and a step 0% longer", "the prediction is 8.9 s and 124 GiB",
        "on a host with 125 GiB", "about 120 GiB for 8B",
    ],
    "docs/paper.md": [
        "The paper reports 1.2 times the speed", "TFLOP/s and MFU are 1.024 times too high",
        "the sheets give 1.09 times the", "published number is measured within 10%",
        "published figures are 1.024 times higher", "| yes, 80% |",
    ],
}  # fmt: skip


@pytest.mark.parametrize("page", sorted(_NOT_MEASURED))
def test_no_measured_number_is_typed_in_by_hand(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for written in (r"(?ms)^```.*?^```", r"(?s)<!--(\w+)-->.*?<!--/-->", r"(?s)<!-- (.*?) -->.*?<!-- end of \1 -->"):
        text = re.sub(written, "", text)
    gone = [words for words in _NOT_MEASURED[page] if words not in text]
    assert gone == [], "the page no longer has these words; take them off the list"
    for words in _NOT_MEASURED[page]:
        text = text.replace(words, "")
    text = re.sub(r"`[^`\n]*`", "", text)
    text = "\n\n".join(part for part in re.split(r"\n\n+|\n(?=- )", text) if "development run" not in part)
    typed = [text[max(0, one.start() - 60) : one.end()] for one in _MEASURED.finditer(text)]
    assert typed == [], "quote the record (docs/quoted.yaml), or say `development run`"


def in_history(commit: str) -> bool:
    """Whether the checkout's branch holds the commit; a changed tree's `-dirty` is not part of its name."""
    words = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", commit.split("-")[0], "HEAD"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0
