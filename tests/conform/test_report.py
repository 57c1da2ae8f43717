"""`burst conform`: table, JSON, HTML, badge, bug reports, exit codes; and that it never hangs."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from conform.cases import case_named
from conform.report import SCHEMA, ConformReport, as_html, as_json, badge, bug_report, summary, table
from conform.run import HANG, NOT_CLAIMED, PASSED, WRONG, CaseResult
from harness.cli import main


def report(*statuses: tuple[str, int, str]) -> ConformReport:
    sentences = {WRONG: ("dk differs by 2.00e-02, <b>first</b> at token 3",), HANG: ("rank 1 gave no answer",)}
    results = [
        CaseResult(case=case_named(name), ranks=ranks, status=status, sentences=sentences.get(status, ()))
        for name, ranks, status in statuses
    ]
    return ConformReport(target="a <ring>", version="1.2", command="burst conform x.py", device="cpu", results=results)


MIXED = (("causal", 2, PASSED), ("causal", 4, WRONG), ("window", 2, NOT_CLAIMED), ("window", 4, NOT_CLAIMED),
         ("sinks", 2, NOT_CLAIMED), ("sinks", 4, PASSED), ("full", 2, HANG), ("full", 4, PASSED))  # fmt: skip


def test_a_case_passes_where_it_passes_on_all_ranks_that_claim_it_and_what_is_not_claimed_does_not_count() -> None:
    found = report(*MIXED)
    assert (found.passed, found.claimed) == (1, 3)
    assert summary(found) == "a <ring> 1.2: fails 2 of 3 cases that it claims on 2, 4 ranks (cpu); 1 not claimed"
    assert summary(report(MIXED[0])).endswith("passes the one case that it claims on 2 ranks (cpu)")
    assert summary(report(MIXED[2])).endswith("claims none of 1 cases on 2 ranks (cpu)")
    lines = table(found)
    assert lines[1].split() == ["causal", "ok", "wrong"]
    assert lines[2].strip().startswith("4 ranks: dk differs by 2.00e-02")
    assert [line.split() for line in lines if line.startswith("window")] == [["window", "-", "-"]]


def test_json_has_a_schema_and_every_result() -> None:
    found = json.loads(json.dumps(as_json(report(*MIXED)), allow_nan=False))
    assert found["schema"] == SCHEMA == "burst-conform/1"
    assert {case["name"]: case["status"] for case in found["cases"]} == {
        "causal": WRONG, "window": NOT_CLAIMED, "sinks": PASSED, "full": HANG,
    }  # fmt: skip
    assert list(found) == [
        "schema", "target", "version", "command", "device", "versions", "passed", "claimed", "cases",
    ]  # fmt: skip
    assert list(found["cases"][0]["results"][0]) == ["ranks", "status", "seconds", "sentences", "differences"]


def test_html_and_badge_escape_what_a_target_says() -> None:
    page, image = as_html(report(*MIXED)), badge(report(*MIXED))
    assert "<ring>" not in page
    assert "<b>first</b>" not in page
    assert "burst conform: 1/3" in page
    assert ElementTree.fromstring(image).get("aria-label") == "burst conform: 1/3"
    assert ("#c62828" in image, "#2e7d32" in badge(report(MIXED[0]))) == (True, True)
    assert 'href="https://github.com/NVIDIA/Megatron-LM/issues/1464"' in page


def test_a_bug_report_says_versions_command_expected_and_found() -> None:
    found = report(*MIXED)
    text = bug_report(found, found.failures[0])
    for part in ("case causal on 4 ranks", "a <ring> 1.2, python", "`burst conform x.py`", "Expected: what one process",
                 "- dk differs by 2.00e-02", "tokens=64", "NVIDIA/Megatron-LM#1464"):  # fmt: skip
        assert part in text
    assert "Expected: an answer of every rank" in bug_report(found, found.failures[1])


WRONG_TARGET = "from tests.conform import seeded\nglobals().update(seeded.target('attention', {fault!r}, ranks=(2,)))\n"


def test_the_command_judges_a_file_and_its_exit_code_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(WRONG_TARGET.format(fault="dK scaled by 1.02"))
    words = ["conform", str(file), "--case", "causal", "--out", str(tmp_path / "out")]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "2 ranks: dk differs by 2.00e-02" in said
    assert "1.02 times the truth everywhere" in said
    assert "## dK scaled by 1.02: case causal on 2 ranks" in said
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"report.json", "report.html", "badge.svg", "bugs.md"}
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["command"] == "burst conform mine.py --case causal --out DIR"
    [difference] = report["cases"][0]["results"][0]["differences"]
    assert difference["tensor"] == "dk"
    assert (difference["token"], difference["head"], difference["rank"]) == (0, 0, 0)
    file.write_text(WRONG_TARGET.format(fault=""))
    assert main(["conform", str(file), "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] == 5


def test_what_no_report_left_is_not_overwritten_and_no_case_runs_before_that_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "out"
    file.write_text(WRONG_TARGET.format(fault=""))
    words = ["conform", str(file), "--case", "causal", "--out"]
    assert main([*words, str(out)]) == 0
    assert main([*words, str(out)]) == 0  # over its own report

    def no_case(*_: object, **__: object) -> None:
        raise AssertionError("a case ran")

    monkeypatch.setattr("conform.run.run", no_case)
    (out / "run.json").touch()
    mine, run = tmp_path / "mine", tmp_path / "run"
    for folder, name in ((mine, "report.html"), (run, "training.json")):
        folder.mkdir()
        (folder / name).write_text("mine")
    capsys.readouterr()
    for folder, said in (
        (out, "is the directory of a run (run.json); give --out another directory"),
        (run, "is the directory of a run (training.json); give --out another directory"),
        (mine, "holds report.html, which is of no report of burst conform; give --out another one"),
        (file, "is a file; give --out a directory"),
    ):
        assert main([*words, str(folder)]) == 2
        assert said in capsys.readouterr().err
    assert (mine / "report.html").read_text() == "mine"


def test_the_list_names_targets_and_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "--list"]) == 0
    said = capsys.readouterr().out
    assert "burst_attention" in said
    assert "axolotl-ai-cloud/axolotl#3608" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "names no target"),
        (["burst_atention"], "did you mean burst_attention"),
        (["my ring.py"], "there is no file my ring.py; give the path of a target"),
        (["burst_attention", "--case", "cuasal"], "did you mean causal"),
        (["burst_attention", "--case", "step"], "is a target of attention, and step a case of another kind"),
        (["burst_attention", "--ranks", "0"], "have to be positive"),
        (
            ["burst_attention", "--ranks", "2", "3"],
            "does not run on 3 ranks; choose from 1, 2, 4, 8, RANKS in its file",
        ),
        (["burst_attention", "--device", "cuda"], "needs a GPU, and torch finds none here; leave it out for ranks on"),
        (["torch_context_parallel:flex", "--device", "cuda"], "runs on cpu ranks alone; choose --device cpu"),
    ],
)
def test_what_is_typed_wrong_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["conform", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_what_was_found_before_a_ctrl_c_is_shown_without_a_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report(*MIXED[:2]).results

    def broken_off(*_: object, **__: object) -> Generator[CaseResult, None, None]:
        yield from found
        raise KeyboardInterrupt

    monkeypatch.setattr("conform.run.run", broken_off)
    words = ["conform", "burst_attention", "--case", "causal", "--out", str(tmp_path / "out")]
    assert main(words) == 1
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines()] == ["case", "causal", "4"]
    assert "dk differs by 2.00e-02" in told.out
    assert "interrupted after 2 of 4 results, which are above; nothing is written" in told.err
    assert not list((tmp_path / "out").iterdir())
