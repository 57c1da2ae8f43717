"""Reports of several runs as one site: every link leads somewhere, and each run is said with its own facts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from harness.cli import main
from harness.records.stored import runs_below, stored_run
from tests.harness.report.test_report import Page, run_of
from tests.harness.synthetic_records import record

ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT / "results" / "published"


def links(page: Path) -> list[str]:
    """Links to other files."""
    return [link for link in Page(page.read_text(encoding="utf-8")).links if not link.startswith(("data:", "#"))]


def dead_links(site: Path) -> list[str]:
    """Links of the site's pages that lead to no file of it."""
    return [
        f"{page.relative_to(site)}: {link}"
        for page in site.rglob("*.html")
        for link in links(page)
        if urlsplit(link).scheme or not (page.parent / unquote(link)).resolve().is_relative_to(site.resolve())
        or not (page.parent / unquote(link)).is_file()
    ]  # fmt: skip


def reached(site: Path) -> set[Path]:
    """Pages that the index links."""
    return {(site / unquote(link)).resolve() for link in links(site / "index.html")}


@pytest.mark.slow
def test_the_site_of_the_published_records_has_a_page_for_each_run_and_no_dead_link(tmp_path, capsys):
    site = tmp_path / "site"
    assert main(["report", str(PUBLISHED), "--out", str(site)]) == 0
    assert capsys.readouterr().out == f"Report: {site / 'index.html'}\n"
    folders = {stored_run(path).report_dir.relative_to(PUBLISHED) for path in runs_below(PUBLISHED)}
    assert len(folders) > 10
    assert {path.parent.relative_to(site.resolve()) for path in reached(site)} == folders
    assert dead_links(site) == []
    text = Page((site / "index.html").read_text()).text
    for words in ("cpu", "NVIDIA H200", "A million tokens", "2026-11-", "is faster than the fastest other method in"):
        assert words in text
    assert text.index("NVIDIA H200") < text.rindex(" cpu ")


def test_generated_pages_of_published_records_are_not_in_git() -> None:
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "results"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert [path for path in listed.stdout.splitlines() if path.endswith(".html")] == []
    for made in ("index.html", "h200x4/quickstart/report.html", "h200x4/quickstart/tables/results.md"):
        ignored = ["git", "-C", str(ROOT), "check-ignore", "-q", f"results/published/{made}"]
        assert subprocess.run(ignored, check=False).returncode == 0, made


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A plain directory of runs: two of them here, one deeper, and files that are no run."""
    root = tmp_path / "runs"
    run_of(root / "monday", [record(title="First"), record(method="ring", status="oom", reason="too large")])
    run_of(root / "a b#1", [record(title="Second <b>bold</b>")])
    run_of(root / "deep" / "er" / "run", [record(title="Third")])
    run_of(root / ".hidden", [record()])
    (root / "notes").mkdir()
    (root / "notes" / "a.txt").write_text("mine")
    return root


def test_any_directory_of_runs_makes_a_site_in_its_place(runs: Path) -> None:
    assert main(["report", str(runs)]) == 0
    folders = ("monday", "a b#1", "deep/er/run")
    assert reached(runs) == {(runs / folder / "report.html").resolve() for folder in folders}
    assert dead_links(runs) == []
    index = Page((runs / "index.html").read_text())
    assert not {"b", "link", "img"} & set(index.tags)
    for words in ("Second <b>bold</b>", "4 records of 3 runs", "1 ok , 1 oom", "0123abc"):
        assert words in index.text, index.text
    page = links(runs / "deep" / "er" / "run" / "report.html")
    assert page[:2] == ["../../../index.html"] * 2  # for both widths
    assert all(link.endswith("/record.json") for link in page[2:])
    assert not (runs / "monday" / "tables").exists()
    assert (runs / "notes" / "a.txt").read_text() == "mine"


def test_a_site_has_the_other_files_where_they_are_asked_for(runs: Path, tmp_path: Path) -> None:
    assert main(["report", str(runs), "--out", str(tmp_path / "site"), "--format", "csv,md"]) == 0
    made = {path.name for path in (tmp_path / "site" / "monday").iterdir()}
    assert made == {"report.html", "results.csv", "tables"}
    assert not (runs / "index.html").exists()


def test_a_site_made_twice_is_the_same(runs: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert main(["report", str(runs), "--out", str(tmp_path / name)]) == 0
    one, two = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.html")}
        for name in ("one", "two")
    )
    assert one == two


def test_a_run_whose_records_cannot_be_read_is_said_and_the_others_have_their_pages(runs, capsys):
    bad = runs / "monday" / "trials" / "bad"
    bad.mkdir()
    (bad / "record.json").write_text("{")
    assert main(["report", str(runs)]) == 1
    assert "record.json" in capsys.readouterr().err
    assert len(reached(runs)) == 2
    assert dead_links(runs) == []
    assert "monday" in Page((runs / "index.html").read_text()).text


def test_a_run_itself_is_no_site_and_its_report_has_no_index(runs: Path) -> None:
    assert runs_below(runs / "monday") == []
    assert main(["report", str(runs / "monday"), "--format", "html"]) == 0
    found = links(runs / "monday" / "report.html")
    assert found
    assert all(link.endswith("/record.json") for link in found)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runs/notes"], "no record below runs/notes; name directories that `burst run` left"),
        (["runs", "runs/monday"], "runs holds several runs; give it alone for a site, or name the runs in it"),
        (["runs", "--format", "docx"], "format 'docx' is unknown; choose from csv"),
        (["runs", "--format", ","], "--format ',' names no format"),
        (["runs", "--out", "runs/notes/a.txt"], "a.txt is a file; give --out a directory"),
    ],
)
def test_what_cannot_become_a_site_is_one_sentence(runs, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(runs.parent)
    assert main(["report", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
