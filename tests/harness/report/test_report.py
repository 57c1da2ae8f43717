"""The report as a whole: one self-contained page and its files, from records alone."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from rich.console import Console

from harness.cli import main
from harness.records.record import Record, write_record
from harness.report.page import read_runs, write_report
from harness.report.results import rows_of
from harness.report.tables.trials import terminal_table
from tests.harness.synthetic_records import H200, LARGE, around, cpu_sweep, record


def run_of(folder: Path, records: Sequence[Record]) -> Path:
    for one in records:
        write_record(folder / "trials" / one.trial_id, one)
    return folder


class Page(HTMLParser):
    """Tags in order, all addresses, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "data", "action", "srcset")]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = run_of(tmp_path_factory.mktemp("runs") / "demo", cpu_sweep())
    assert write_report([folder], folder) == folder / "report.html"
    return folder


def test_a_subject_and_names_of_ones_own_reach_verdict_tables_and_figures(tmp_path: Path, capsys) -> None:
    rounds = [around(0.2), around(0.3), around(0.1)]
    methods = ("burst", "ring", "ulysses")
    trials = [
        record(method=method, gpu=H200, seq_len=length, rounds=own)
        for method, own in zip(methods, rounds, strict=True)
        for length in (1024, 2048)
    ]
    folder = run_of(tmp_path / "run", trials)
    assert (
        main(["report", str(folder), "--subject", "ring", "--label", "ring=Ours", "--label", "burst=The old one"]) == 0
    )
    page = (folder / "report.html").read_text()
    assert "Ours is slower than ulysses" in page
    with open(folder / "tables" / "comparison.csv", newline="") as file:
        assert {(line["method"], line["beside"]) for line in csv.DictReader(file)} == {
            ("Ours", "ulysses"),
            ("Ours", "The old one"),
        }
    with open(folder / "tables" / "speed_by_length.csv", newline="") as file:
        assert {line["method"] for line in csv.DictReader(file)} == {"Ours", "ulysses", "The old one"}
    with open(folder / "results.csv", newline="") as file:
        assert {(line["method"], line["method_label"], line["subject"]) for line in csv.DictReader(file)} == {
            ("burst", "The old one", "false"),
            ("ring", "Ours", "true"),
            ("ulysses", "", "false"),
        }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--subject", "rin"], "--subject rin: no trial of these records is of that method; did you mean ring?"),
        (["--label", "rin=Ours"], "--label rin: no trial of these records is of that method; did you mean ring?"),
        (["--label", "ring"], "--label ring: expected METHOD=NAME, such as mine=Ours"),
        (["--label", "ring=burst"], "--label: two methods would be called 'burst'; give each a name of its own"),
        (["--label", "ring=A", "--label", "ring=B"], "--label ring=B: ring is called A already"),
        (["--subject", "ring", "--baseline", "ring"], "--subject and --baseline are both ring; name two methods"),
    ],
)
def test_a_subject_or_a_name_that_cannot_be_is_refused_in_one_sentence(tmp_path, capsys, arguments, message) -> None:
    folder = run_of(tmp_path / "run", [record(), record(method="ring")])
    assert main(["report", str(folder), *arguments]) == 2
    said = capsys.readouterr().err
    assert (message in said, said.count("\n")) == (True, 1)


def test_a_report_leaves_page_figures_and_tables(full: Path) -> None:
    figures = {path.name for path in (full / "figures").iterdir()}
    assert {
        "speed-train.png",
        "speed-train.pdf",
        "speed-train.tex",
        "speed-attention.png",
        "speed-attention.pdf",
    } <= figures
    tables = {path.name for path in (full / "tables").iterdir()}
    names = ("results", "comparison", "agreement", "accuracy", "problems", "speed_by_length")
    assert tables == {f"{name}.{kind}" for name in names for kind in ("md", "tex", "csv")}


def test_the_page_needs_nothing_from_elsewhere(full: Path) -> None:
    text = (full / "report.html").read_text()
    page = Page(text)
    assert page.tags.count("svg") >= 4
    files = [link for link in page.links if not link.startswith("#")]
    assert all((full / unquote(link)).is_file() for link in files), files
    assert not {"link", "iframe", "object", "img"} & set(page.tags)
    assert page.tags.count("script") == 1
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style


def test_the_page_says_what_happened_where_and_by_which_formula(full: Path) -> None:
    text = Page((full / "report.html").read_text()).text
    for part in (
        "A small sweep",
        "33 of 36 trials gave a measurement; 1 oom, 1 refused, 1 timeout.",
        "All methods and parallel sizes compute the same thing",
        "rank 2 ran out of memory allocating 3.1 GiB",
        "4 KV heads do not split into 8 ranks",
        "torch 2.13.0+cpu",
        "0123abc",
        "MFU = 3 × forward FLOPs",
    ):
        assert part in text, part


def test_text_from_records_is_escaped(tmp_path: Path) -> None:
    hostile = '<script>alert("x")</script><img src=http://example.invalid/x.png>'
    folder = run_of(tmp_path / "r", [record(status="failed", reason=hostile, title=hostile), record(method="ring")])
    page = Page(write_report([folder], tmp_path / "out", {"html"}).read_text())
    assert page.tags.count("script") == 1  # ours
    assert all(link.startswith(("data:", "#")) for link in page.links if "record.json" not in link)
    assert hostile in page.text


@pytest.mark.parametrize("status", ["refused", "oom", "interrupted", "node_lost"])
def test_a_run_without_a_single_number_still_has_a_report(tmp_path: Path, status: str) -> None:
    records = [record(status=status, reason=f"because of {cp_size}", cp_size=cp_size) for cp_size in (1, 2)]  # type: ignore[arg-type]
    page = Page(write_report([run_of(tmp_path / "r", records)], tmp_path / "out").read_text())
    assert f"0 of 2 trials gave a measurement; 2 {status}." in page.text
    assert "because of 1" in page.text
    assert not (tmp_path / "out" / "figures").exists()


def test_runs_of_different_experiments_share_a_report_without_mixing_figures(tmp_path: Path) -> None:
    small = run_of(tmp_path / "small", [record(), record(method="megatron_cp", seconds=0.3)])
    large = run_of(
        tmp_path / "large",
        [
            record(experiment="big", title="A large sweep", model=LARGE, dtype="bf16", gpu=H200, seq_len=seq_len)
            for seq_len in (1024, 2048)
        ],
    )
    page = Page(write_report([small, large], tmp_path / "out").read_text())
    assert "A small sweep · A large sweep" in page.text
    figures = {path.stem for path in (tmp_path / "out" / "figures").glob("*.png")}
    assert {"speed-small-quickstart-small-fp32", "speed-large-big-1b-bf16"} <= figures


def test_runs_with_one_name_are_told_apart(tmp_path: Path) -> None:
    one, other = (run_of(tmp_path / name / "demo", [record()]) for name in ("monday", "tuesday"))
    _, rows = read_runs([one, other, one])
    assert [row["run"] for row in rows] == ["monday/demo", "tuesday/demo"]


def test_only_the_formats_asked_for_are_written(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "r", [record(), record(method="ring")])
    assert write_report([folder], tmp_path / "out", {"md", "pdf"}) == tmp_path / "out"
    written = {path.suffix for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert written == {".md", ".pdf", ".tex"}  # a PDF's caption lies beside it


def test_an_unknown_format_and_an_empty_run_are_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "r", [record()])
    with pytest.raises(ValueError, match="format 'docx' is unknown; choose from csv, html"):
        write_report([folder], tmp_path, {"docx"})
    with pytest.raises(ValueError, match=r"no record below .*empty; name directories"):
        write_report([tmp_path / "empty"], tmp_path)


def test_what_an_earlier_report_left_and_this_one_has_no_more_is_removed(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "r", [record(), record(method="ring", status="failed", reason="a cable")])
    write_report([folder], tmp_path)
    of_a_part = tmp_path / "figures" / "loss-of-a-part.png"
    of_a_part.parent.mkdir(exist_ok=True)
    page = tmp_path / "report.html"
    page.write_text(page.read_text() + '<a href="figures/loss-of-a-part.png">')
    own = [tmp_path / "tables" / "mine.csv", tmp_path / "tables" / "problems-of-mine.csv"]
    own.append(tmp_path / "figures" / "loss-annotated.png")
    for path in (*own, of_a_part):
        path.write_text("kept")
    own.append(tmp_path / "tables" / "speed_by_length.csv")
    own[-1].mkdir()
    assert (tmp_path / "tables" / "problems.csv").exists()
    folder = run_of(tmp_path / "r2", [record(), record(method="ring")])
    write_report([folder], tmp_path, {"csv", "html", "png"})
    assert not (tmp_path / "tables" / "problems.csv").exists()
    assert not of_a_part.exists()
    assert (tmp_path / "tables" / "problems.md").exists()  # markdown was not asked for this time
    assert all(path.exists() for path in own)


def test_a_dollar_in_a_name_is_one(tmp_path: Path) -> None:
    """And no beginning of mathematics, which draws other letters or cannot be parsed."""
    names = {"burst": "$x^{y$", "ulysses": "A$_b$"}
    folder = run_of(tmp_path / "r", cpu_sweep())
    page = write_report([folder], tmp_path / "out", {"html", "png"}, labels=names).read_text()
    assert re.search(r"<svg.*>[^<]*A\$_b\$[^<]*<.*</svg>", page, re.DOTALL)


def test_a_report_made_twice_is_the_same(tmp_path: Path) -> None:
    folder = run_of(tmp_path / "r", [record(), record(method="ring")])
    first = write_report([folder], tmp_path / "a", {"html", "tex"}).read_bytes()
    assert write_report([folder], tmp_path / "b", {"html", "tex"}).read_bytes() == first


def test_the_terminal_table_tells_trials_of_two_masks_apart() -> None:
    def masks(*names: str) -> list[list[str]]:
        columns = terminal_table(rows_of([record(task="attention", mask=name) for name in names])).columns
        return [list(map(str, column.cells)) for column in columns if column.header == "mask"]

    assert masks("causal", "causal") == []
    assert masks("causal", "documents:3,5,...") == [["causal", "documents:3,5,..."]]


def test_the_terminal_table_has_a_line_per_trial_with_number_or_reason() -> None:
    rows = rows_of([record(seconds=0.2), record(method="ring", status="failed", reason="[red]rank 1 died[/red]")])
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(terminal_table(rows))
    lines = [line.strip() for line in console.export_text().splitlines()]
    [ok] = [line for line in lines if line.startswith("burst")]
    [failed] = [line for line in lines if line.startswith("ring")]
    assert re.search(r"208 .* ok", ok)
    assert "failed: [red]rank 1 died[/red]" in failed


def test_reports_are_made_without_torch_and_without_pyplot() -> None:
    report = "import sys, harness.report.page; harness.report.page.all_figures()"
    code = f"{report}; print({{'torch', 'matplotlib.pyplot'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_trials_without_a_record_and_records_that_stand_twice_are_said(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    made = [record(method="burst"), record(method="ring"), record(method="ulysses")]
    for one in made:
        write_record(run / "trials" / one.trial_id, one)
    (run / "run.json").write_text(json.dumps({"trials": [one.trial_id for one in made]}))
    assert main(["report", str(run), "--format", "csv"]) == 0
    assert "have a record" not in capsys.readouterr().err
    assert main(["report", str(run), str(run), "--format", "csv"]) == 0  # one run, read once
    assert "stands twice" not in capsys.readouterr().err
    (run / "trials" / made[2].trial_id).rename(tmp_path / "elsewhere")
    shutil.copytree(run / "trials" / made[1].trial_id, run / "trials" / "copy")
    assert main(["report", str(run), "--format", "csv"]) == 0
    said = capsys.readouterr().err
    assert f"2 of 3 trials of {run} have a record; burst status {run} names the others" in said
    assert (
        f"{made[1].trial_id} stands twice, in {run}/trials/copy/record.json and {run}/trials/{made[1].trial_id}" in said
    )
    shutil.copytree(run, tmp_path / "again")
    main(["report", str(run), str(tmp_path / "again"), "--format", "csv", "--out", str(tmp_path / "both")])
    assert f"{made[0].trial_id} stands twice" in capsys.readouterr().err


def test_a_report_overwrites_no_file_that_it_did_not_make(tmp_path: Path, capsys) -> None:
    run, mine = tmp_path / "runs" / "run", tmp_path / "mine"
    write_record(run / "trials" / record().trial_id, record())
    mine.mkdir()
    for command, file in (
        (["report", str(run), "--out", str(mine)], mine / "report.html"),
        (["report", str(run), "--out", str(mine)], mine / "results.csv"),
        (["report", str(run.parent)], run.parent / "index.html"),
    ):
        file.write_text("<!DOCTYPE html>\n<p>mine</p>\n")
        assert main(command) == 2
        assert f"{file} is no earlier {file.name} of burst and would be overwritten" in capsys.readouterr().err
        assert file.read_text() == "<!DOCTYPE html>\n<p>mine</p>\n"
        file.unlink()
        for _ in range(2):  # over its own
            assert main(command) == 0
            assert file.exists()


def test_a_report_goes_into_the_directory_of_no_other_run(tmp_path: Path, capsys) -> None:
    """The report there would be one of other records, such as those of the run before it went on."""
    run, packed, other = tmp_path / "runs" / "run", tmp_path / "runs" / "run.jsonl", tmp_path / "other" / "run"
    for folder, seconds in ((run, 0.2), (other, 0.3)):
        write_record(folder / "trials" / record().trial_id, record(seconds=seconds))
    assert main(["verify", "pack", str(run), "--out", str(packed)]) == 0
    write_record(run / "trials" / record(seq_len=2048).trial_id, record(seq_len=2048))
    for folder in (run, other):
        assert main(["report", str(folder)]) == 0
    before = [(folder / name).read_bytes() for folder in (run, other) for name in ("results.csv", "report.html")]
    for command, kept in (
        ([str(packed)], run),
        ([str(packed), "--out", str(run)], run),
        ([str(run), "--out", str(other)], other),
    ):
        capsys.readouterr()
        assert main(["report", *command]) == 2
        said = f"{kept} is a run, whose report one of {command[0]} would replace; give --out another directory"
        assert said in capsys.readouterr().err
    packed.unlink()
    assert main(["report", str(run.parent), "--out", str(other.parent)]) == 2
    assert f"{other} is a run, whose report one of {run} would replace" in capsys.readouterr().err
    assert before == [
        (folder / name).read_bytes() for folder in (run, other) for name in ("results.csv", "report.html")
    ]
    assert main(["report", str(run), str(other), "--out", str(run)]) == 0  # of both, as without --out


def test_a_report_replaces_no_tables_and_figures_where_none_of_its_own_lies_beside_them(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    write_record(run / "trials" / record().trial_id, record())
    for folder in ("tables", "figures"):
        mine = tmp_path / f"mine_{folder}"
        (mine / folder).mkdir(parents=True)
        kind = {"tables": "csv", "figures": "png"}[folder]
        (mine / folder / f"mine.{kind}").write_text("mine")
        assert main(["report", str(run), "--out", str(mine)]) == 2
        assert f"{mine / folder} holds mine.{kind}, and {mine} no report of burst; give" in capsys.readouterr().err
        assert [path.name for path in mine.iterdir()] == [folder]
