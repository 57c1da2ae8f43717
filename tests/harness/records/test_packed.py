"""A packed run gives what its directory gives, and a damaged one is refused in a sentence that names file and line."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.records.record import write_record
from harness.records.stored import read_records, run_named, runs_below, stored_run
from harness.report.page import read_runs
from tests.harness.report.test_site import dead_links, links, reached
from tests.harness.synthetic_records import record
from tests.harness.verify.test_verify import STATED, reported, sweep

EXPERIMENT = "# As resolved\ntask: train\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as `burst run` leaves it, and its packed run beside it in another folder."""
    root = tmp_path_factory.mktemp("packed")
    run = reported(root / "there" / "demo", sweep(), "csv", "md", "tex", "html")
    trials = [one.trial_id for one in read_records(run)]
    (run / "run.json").write_text(json.dumps({"experiment": "demo", "trials": trials}))
    (run / "experiment.yaml").write_text(EXPERIMENT)
    assert main(["verify", "pack", str(run), "--out", str(root / "packed" / "demo.jsonl")]) == 0
    return root


@pytest.fixture
def packed(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(whole / "packed" / "demo.jsonl", tmp_path / "demo.jsonl"))


def test_a_packed_run_gives_the_records_rows_and_statements_of_its_directory(whole: Path, packed: Path) -> None:
    directory, file = stored_run(whole / "there" / "demo"), stored_run(packed)
    (ours, rows), (theirs, packed_rows) = read_runs([directory.path]), read_runs([packed])
    assert len(ours) == 3
    assert (ours, rows) == (theirs, packed_rows)
    assert [list(row) for row in rows] == [list(row) for row in packed_rows]
    assert directory.stated() == file.stated() != stored_run(packed.parent).stated()
    assert directory.planned() == file.planned() == sorted(one.trial_id for one in ours)
    assert directory.header() == file.header()
    assert file.header().experiment == EXPERIMENT
    assert packed.read_text().count("\n") == 4
    assert packed.read_text().startswith('{"burst_run":1,"records":3,')


def test_a_report_of_a_packed_run_is_that_of_its_directory_and_lies_beside_it(whole: Path, packed: Path) -> None:
    directory, out = whole / "there" / "demo", packed.with_suffix("")
    assert main(["report", str(packed), "--format", "csv,md,tex,html"]) == 0
    for made in [Path("results.csv"), *(path.relative_to(directory) for path in directory.glob("tables/*"))]:
        assert (out / made).read_bytes() == (directory / made).read_bytes(), made
    assert set(links(out / "report.html")) >= {"../demo.jsonl"}
    assert not [link for link in links(out / "report.html") if "trials" in link]


def test_a_packed_run_holds_as_its_directory_does(whole, packed, capsys):
    assert main(["verify", str(whole / "there" / "demo")]) == 0
    directory = capsys.readouterr().out
    assert main(["verify", str(packed), "--reference", str(whole / "there" / "demo")]) == 0
    said = capsys.readouterr().out
    assert [line for line in directory.splitlines() if line.startswith("stated: ")] == [
        line for line in said.splitlines() if line.startswith("stated: ")
    ]
    assert "demo: 3 records, 5 of 5 comparisons with the reference pass, all checks hold" in said
    assert main(["report", str(packed), "--format", "csv,md"]) == 0
    (packed.with_suffix("") / "tables" / "results.md").write_text("other")
    assert main(["verify", str(packed)]) == 1
    assert "tables/results.md: tables: found other contents" in capsys.readouterr().out


def edited(packed: Path, line: int, change: Callable[[Any], Any]) -> None:
    lines = packed.read_text().splitlines(keepends=True)
    data = json.loads(lines[line - 1])
    change(data)
    lines[line - 1] = json.dumps(data, separators=(",", ":")) + "\n"
    packed.write_text("".join(lines))


FOUND: dict[str, tuple[int, Callable[[Any], Any], str]] = {
    "a setting": (2, lambda one: one["settings"].update(seed=7), "the digest of its settings"),
    "a planned trial": (1, lambda one: one["plan"]["trials"].append("train-x"), "train-x: schema: found no record"),
    "a plan without trials": (1, lambda one: one.update(plan={}), "no list of trials"),
    "a statement": (1, lambda one: one["provenance"]["reasons"][0].update(trials=["x-*"]), "which no record has"),
    "a path": (1, lambda one: one.update(experiment="data: /home/ada/x"), "header: secrets: found a path below a home"),
}


@pytest.mark.parametrize("name", FOUND)
def test_verify_finds_what_does_not_hold_in_a_packed_run(name, packed, capsys):
    line, change, words = FOUND[name]
    edited(packed, line, change)
    assert main(["verify", str(packed)]) == 1
    assert words in capsys.readouterr().out


def rewritten(change: Callable[[list[str]], list[str]]) -> Callable[[Path], object]:
    return lambda path: path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def in_header(old: str, new: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


def linked(to: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        path.unlink()
        path.symlink_to(to)

    return change


HEADER: dict[str, tuple[Callable[[Path], object], str]] = {
    "an empty file": (lambda path: path.write_text(""), ":1: found no header of a packed run"),
    "a record first": (rewritten(lambda lines: lines[1:]), ":1: found no header of a packed run"),
    "half a header": (lambda path: path.write_text('{"burst_run":1,"rec'), ":1: the header cannot be used"),
    "a later version": (in_header('"burst_run":1', '"burst_run":2'), "burst_run is 2; this version of burst reads 1"),
    "a version in words": (in_header('"burst_run":1', '"burst_run":true'), "burst_run is true"),
    "an unknown key": (in_header('"records"', '"hosts":[],"records"'), "unknown key hosts; expected burst_run"),
    "no count": (in_header('"records":3,', ""), "the whole lacks records"),
    "a key twice": (in_header('"records":3', '"records":3,"records":4'), "the key 'records' is given twice"),
    "provenance as text": (in_header('"provenance":{', '"provenance":"x","plan":{'), "given twice"),
}
LINES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a line that is no JSON": (rewritten(lambda lines: [*lines[:2], "{\n", *lines[3:]]), ":3 is not a record"),
    "an empty line": (rewritten(lambda lines: [*lines[:2], "\n", *lines[3:]]), ":3 is not a record"),
    "a line that is no record": (rewritten(lambda lines: [*lines[:3], '{"trial_id":"z"}\n']), ":4 is not a record"),
    "a number that is none": (
        lambda path: path.write_text(path.read_text().replace('"wall_seconds":', '"wall_seconds":NaN,"x":', 1)),
        ":2 is not a record of schema 1 (NaN is no number",
    ),
    "an id that leads outside": (
        rewritten(lambda lines: [*lines[:3], '{"trial_id":"../x"}\n']), "(it has no trial_id of letters"),
    "records out of order": (rewritten(lambda lines: [*lines[:2], lines[3], lines[2]]), "in ascending order"),
    "a record twice": (rewritten(lambda lines: [*lines[:3], lines[2]]), ":4 is not a record"),
    "a record less": (rewritten(lambda lines: lines[:3]), ":1: the header says 3 records, and 2 lines follow"),
    "a record more": (
        rewritten(lambda lines: [lines[0].replace(":3,", ":2,"), *lines[1:]]), "says 2 records, and 3 lines follow"),
    "an end that is lost": (lambda path: path.write_text(path.read_text()[:-1]), ":4 is not a record"),
}  # fmt: skip
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a device": (linked("/dev/zero"), "the packed run is a device; give a regular file"),
    "nothing": (Path.unlink, "no such packed run"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "is a named pipe"),
}


@pytest.mark.parametrize(("change", "words"), [*HEADER.values(), *LINES.values(), *FILES.values()],
                         ids=[*HEADER, *LINES, *FILES])  # fmt: skip
def test_no_damage_ends_in_a_traceback_or_goes_unnoticed(change, words, packed, capsys):
    change(packed)
    methods, out = ["--methods", "burst", "ring"], ["--out", "x.jsonl"]
    for command in (["report"], ["compare", *methods], ["verify", "pack", *out]):
        assert main([*command, str(packed)]) == 2, command
        said = capsys.readouterr().err
        assert words in said, said
        assert str(packed) in said
        assert len(said) < 1500
    assert main(["verify", str(packed)]) in (1, 2)
    out, err = capsys.readouterr()
    assert words in out + err
    assert not packed.with_suffix("").exists()


def test_a_statement_is_read_as_strictly_as_in_its_own_file(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    in_header('"command"', '"commands"')(packed)
    for command in (["report"], ["verify"], ["verify", "pack"]):
        assert main([*command, str(packed)]) == 2
        said = capsys.readouterr().err
        assert f"{packed}:1: unknown key commands in provenance.yaml; did you mean command?" in said


def test_a_bad_line_is_not_set_aside(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(packed, 2, lambda one: one.update(schema=9))
    before = packed.read_bytes()
    assert main(["report", str(packed), "--set-aside-bad"]) == 2
    assert "correct these lines, or pack the run again with `burst verify pack`" in capsys.readouterr().err
    assert packed.read_bytes() == before


def test_two_packed_runs_are_compared(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "later.jsonl"
    write_record(tmp_path / "later" / "trials" / (one := record(seconds=0.3)).trial_id, one)
    assert main(["verify", "pack", str(tmp_path / "later"), "--out", str(other)]) == 0
    assert main(["compare", str(packed), str(other), "--json"]) == 0
    [pair] = json.loads(capsys.readouterr().out.partition("\n")[2])["pairs"]
    assert pair["reference"]["record"] == f"{packed}:2"
    assert pair["candidate"]["record"] == f"{other}:2"


def test_an_archive_of_a_packed_run_holds(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "artifact.tar.gz"
    assert main(["verify", "pack", str(packed), "--out", str(out)]) == 0
    assert main(["verify", str(out), "--reference", str(packed)]) == 0
    assert "demo: 3 records" in capsys.readouterr().out


def test_a_packed_run_is_overwritten_only_where_that_was_asked_for(packed, tmp_path, capsys):
    other = reported(tmp_path / "other", [record()])
    before = packed.read_bytes()
    pack = ["verify", "pack", str(other), "--out", str(packed)]
    assert main(pack) == 2
    assert "exists with other contents; give --replace" in capsys.readouterr().err
    assert packed.read_bytes() == before
    assert main([*pack, "--replace"]) == 0
    assert len(read_records(packed)) == 1
    assert main(pack) == 0, "the same contents are no other ones"
    packed.write_text('{"text": "mine"}\n')
    assert main([*pack, "--replace"]) == 2
    assert f"{packed} is no earlier {packed.name} of burst and would be overwritten" in capsys.readouterr().err
    assert packed.read_text() == '{"text": "mine"}\n'


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda run: None, ["--logs"], "holds no logs"),
        (lambda run: shutil.rmtree(run / "trials"), [], "holds no record"),
        (lambda run: (run / "provenance.yaml").write_text("reason: x"), [], "unknown key reason"),
        (lambda run: (run / "provenance.yaml").write_text(STATED + "# /home/ada\n"), [], "a path below a home"),
        (lambda run: (run / "run.json").write_text("{"), [], "run.json is not readable as JSON"),
        (lambda run: next((run / "trials").iterdir()).rename(run / "trials" / "x"), [], "not the name of its dir"),
    ],
)  # fmt: skip
def test_what_cannot_be_packed_leaves_no_file(change, options, words, tmp_path, capsys):
    run, out = reported(tmp_path / "run", [record()]), tmp_path / "out.jsonl"
    change(run)
    assert main(["verify", "pack", str(run), "--out", str(out), *options]) == 2
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_a_site_has_a_page_for_each_packed_run_and_takes_no_other_lines_for_one(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "h200x1").mkdir()
    run = packed.rename(tmp_path / "h200x1" / "demo.jsonl")
    (tmp_path / "h200x1" / "progress.jsonl").write_text('{"step": 1}\n')
    reported(tmp_path / "cpu" / "there", [record()])
    assert runs_below(tmp_path) == [tmp_path / "cpu" / "there", run]
    assert run_named(tmp_path, "h200x1/demo") == run
    for _ in range(2):  # the second time beside the pages of the first
        assert main(["report", str(tmp_path)]) == 0
        pages = {path.relative_to(tmp_path).as_posix() for path in reached(tmp_path)}
        assert pages == {"cpu/there/report.html", "h200x1/demo/report.html"}
        assert dead_links(tmp_path) == []
    assert "../demo.jsonl" in links(tmp_path / "h200x1" / "demo" / "report.html")
    assert main(["verify", str(tmp_path)]) == 0


def test_a_directory_and_a_file_of_one_name_are_not_both_taken(packed, tmp_path, capsys):
    reported(tmp_path / "demo", [record()])
    for command in (["report", str(tmp_path)], ["report", str(packed), str(tmp_path / "demo")]):
        assert main(command) == 2
        assert "are two runs of one name" in capsys.readouterr().err
