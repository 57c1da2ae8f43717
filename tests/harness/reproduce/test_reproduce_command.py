"""`burst reproduce`: lists, tables, and one figure run and drawn, in real processes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from harness.cli import main
from harness.reproduce.comparison import beside
from harness.reproduce.figures import paper_figures
from harness.reproduce.page import write_all
from harness.reproduce.points import runs_in

PROJECT = Path(__file__).parents[3]


def test_a_figure_is_run_drawn_and_resumed_through_burst_run(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "kernel_single_node", "--launcher", "local"]) == 0
    printed = capfd.readouterr().out
    run_dir = tmp_path / "results" / "runs" / "kernel_single_node"
    assert len(list(run_dir.glob("trials/*/record.json"))) == 2
    assert "Verdict: not run: 2 trials at scale smoke, which stand beside no published number" in printed
    below = run_dir / "reproduction"
    assert (below / "reproduction.html").is_file()
    assert {path.suffix for path in (below / "figures").iterdir()} >= {".png", ".pdf", ".svg"}
    table = (below / "tables" / "reproduction_kernel_single_node.csv").read_text(encoding="utf-8")
    assert "A800-80GB" in table
    assert "cpu" not in table, "a trial on a CPU stands beside no GPU's bar"
    main(["verify", str(run_dir)])
    assert "tables/" not in capfd.readouterr().out, "files of a reproduction are none of a report's"

    assert main(["reproduce", "kernel_single_node", "--launcher", "local", "--resume"]) == 0
    assert capfd.readouterr().err.count("kept from before") == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", list(paper_figures()))
def test_the_smoke_scale_of_every_figure_runs_on_two_cores(tmp_path, monkeypatch, name) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", name, "--scale", "smoke", "--launcher", "local"]) == 0
    with open(tmp_path / "results" / "runs" / name / "results.csv", newline="", encoding="utf-8") as file:
        assert {row["status"] for row in csv.DictReader(file)} == {"ok"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["sprase"], "unknown figure sprase; did you mean sparse?"),
        (["claim"], "unknown figure claim; did you mean claims?"),
        (["sparse", "--scale", "huge", "--draw-only"], "unknown scale huge; expected paper, node, one_gpu or smoke"),
        (["sparse", "--set", "fixed.seqlen=4", "--draw-only"], "seq_len"),
        (["sparse", "--hardware", "h20", "--draw-only"], "hardware 'h20' has no file"),
        (["sparse", "--nodes", "lab.yaml"], "add --scale node or --scale paper"),
        (["--scale", "smoke"], "--scale belongs to a figure"),
        (["claims", "--draw-only"], "--draw-only belongs to a figure"),
        (["claims", "--only", "train-"], "--only belongs to a figure"),
        (["audit", "--retry-failed"], "--retry-failed belongs to a figure"),
    ],
)
def test_a_wrong_command_line_gives_one_sentence(tmp_path, monkeypatch, capsys, arguments, expected) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *arguments]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1


def test_a_computed_figure_runs_nothing_unless_a_scale_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "attention_share_analytic"]) == 0
    assert "Verdict: reproduced: computed: all 11 published numbers, to their last digit" in capsys.readouterr().out
    run_dir = tmp_path / "results" / "runs" / "attention_share_analytic"
    assert not (run_dir / "trials").exists()
    digits = (run_dir / "reproduction" / "tables" / "digits_attention_share_analytic.csv").read_text(encoding="utf-8")
    assert len(digits.splitlines()) == 12


def test_the_list_the_claims_and_the_audit_are_json_for_programs(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    found = {}
    for words in ([], ["claims"], ["audit"], ["e2e_main"]):
        assert main(["reproduce", *words, "--json"]) == 0
        found |= json.loads(capsys.readouterr().out)
    assert set(found) == {"figures", "claims", "audit", "systems", "printed", "reproduction_e2e_main"}
    assert len(found["figures"]) == 15
    assert {one["verdict"] for one in found["claims"]} == {"reproduced", "not run"}, "there are no records here"
    main(["reproduce", "claims"])
    assert "note: no records were found in results/published or results/runs" in capsys.readouterr().err
    assert {one["verdict"] for one in found["figures"]} == {"reproduced", "not run"}
    assert not (tmp_path / "results").exists(), "printing leaves no files"


def test_records_that_cannot_be_used_are_named_and_passed_over(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    bad = tmp_path / "results" / "runs" / "sparse" / "trials" / "one" / "record.json"
    bad.parent.mkdir(parents=True)
    bad.write_text("{", encoding="utf-8")
    assert main(["reproduce"]) == 0
    assert "its row is left out" in capsys.readouterr().err


def test_the_page_of_everything_links_records_and_escapes_what_it_shows(tmp_path) -> None:
    runs = runs_in([PROJECT / "results" / "published"])
    figures = [paper_figures()[name] for name in ("ablation", "attention_share_analytic")]
    path = write_all([(beside(figure, runs), "none") for figure in figures], runs, "predicted: <nothing>", tmp_path)
    page = path.read_text(encoding="utf-8")
    for section in ("claims", "statements", "figures", "audit", "systems", "printed", "reproduction_ablation"):
        assert f'id="{section}"' in page
    assert "h200x4/million_tokens.jsonl:2" in page
    assert "predicted: &lt;nothing&gt;" in page
    assert "w. bwd_opt &amp; double" in page
    assert (tmp_path / "tables" / "audit.csv").is_file()
    assert (tmp_path / "figures" / "reproduction_ablation-peak_memory_gib.pdf").is_file()
