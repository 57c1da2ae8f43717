"""Claims: verdicts follow from records, sentences from published numbers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.files.reader import Node
from engine.settings import Checkpoint
from harness.base.errors import UsageError
from harness.cli import main
from harness.predict.published import published_rows
from harness.records.record import RecordPlace
from harness.report.results import row_of
from harness.reproduce.checks import CHECKS, ClaimedNumber, Factors
from harness.reproduce.claims import (
    claims,
    claims_lines,
    claims_table,
    headline,
    judged,
    read_claims,
    samples,
    slip,
    statements,
)
from harness.reproduce.comparison import VERDICTS
from harness.reproduce.points import all_rows, runs_in
from harness.spec.models import read_model
from tests.harness.synthetic_records import H200, record, with_memory

ROOT = Path(__file__).parents[3]
SEVEN = read_model(Node("7b", "here"), Path())
A800 = "NVIDIA A800-SXM4-80GB"
PART_NAMES = {"topology", "sequence_level_checkpointing", "fused_head", "balance", "falling_utilisation"}


def check(name: str, claimed: ClaimedNumber, rows):
    """The outcome of one check over rows with their places."""
    return CHECKS[name](claimed, [row for row, _ in rows])


def rows_of(*records, run: str = "one"):
    return [(row_of(each, run), RecordPlace(Path(f"{run}.jsonl"), line)) for line, each in enumerate(records, start=2)]


def trained(method: str, seconds: float, **changes):
    values = {"model": SEVEN, "dtype": "bf16", "gpu": A800, "seq_len": 2 << 20, "cp_size": 32} | changes
    return record(method=method, seconds=seconds, **values)


@pytest.fixture(scope="module")
def ours():
    return judged(all_rows(runs_in([ROOT / "results" / "published"])))


def test_every_headline_number_is_a_claim() -> None:
    claimed = [claim.claimed() for claim in claims().claims.values() if claim.row]
    rows = [row for row in published_rows() if row.experiment == "headline_claims"]
    assert sorted(each.value for each in claimed) == sorted(row.value for row in rows)


def test_every_claim_has_a_verdict_a_sentence_and_records_that_exist(ours) -> None:
    assert {one.name for one in ours} == set(claims().claims)
    for one in ours:
        assert one.verdict in VERDICTS
        assert one.why.endswith(".")
        assert "{" not in one.claim + one.why
        assert all(place.file.is_file() and place.line > 1 for place in one.records)
    assert len(claims_table(ours).rows) == len(ours)


def test_evidence_lies_below_results_published(ours) -> None:
    with_evidence = [one for one in ours if one.records]
    assert {"backward_bytes", "longest_7b", "over_a_million", "overlap"} <= {one.name for one in with_evidence}
    for one in with_evidence:
        assert all(place.file.is_relative_to(ROOT / "results" / "published") for place in one.records)


def test_the_same_speedup_on_the_claimed_set_up_is_reproduced_and_a_smaller_one_is_not_comparable() -> None:
    claimed = ClaimedNumber(value=1.2, model="7b", gpus=32, seq_len=2 << 20)
    rows = rows_of(trained("burst", 10.0), trained("ulysses", 12.5), trained("megatron_cp", 20.0))
    found = check("speedup", claimed, rows)
    assert (found.verdict, found.numbers["other"]) == ("reproduced", "ulysses")
    assert found.numbers["ours"] == pytest.approx(1.25)
    assert len(found.trials) == 2
    slower = check("speedup", claimed, rows_of(trained("burst", 10.0), trained("ulysses", 10.5)))
    assert slower.verdict == "partly"
    behind = check("speedup", claimed, rows_of(trained("burst", 12.0), trained("ulysses", 10.0)))
    assert (behind.verdict, behind.numbers["said"]) == ("not", "burst is at 0.83x the speed of ulysses")
    small = rows_of(trained("burst", 10.0, cp_size=4), trained("ulysses", 12.5, cp_size=4))
    assert check("speedup", claimed, small).verdict == "not comparable"
    assert check("speedup", claimed, rows_of(trained("burst", 10.0))).verdict == "not run"


def test_trials_of_different_runs_are_no_speedup() -> None:
    rows = [*rows_of(trained("burst", 10.0), run="one"), *rows_of(trained("ulysses", 12.5), run="two")]
    assert check("speedup", ClaimedNumber(value=1.2), rows).verdict == "not run"


def test_a_claim_about_a_model_is_held_against_that_model_before_a_longer_sequence_of_another() -> None:
    other = replace(SEVEN, name="14b")
    rows = rows_of(
        trained("burst", 10.0, cp_size=4, seq_len=1 << 18), trained("ulysses", 11.0, cp_size=4, seq_len=1 << 18),
        trained("burst", 10.0, cp_size=4, model=other), trained("ulysses", 13.0, cp_size=4, model=other),
    )  # fmt: skip
    found = check("speedup", ClaimedNumber(value=1.2, model="7b", gpus=32, seq_len=2 << 20), rows)
    assert (found.numbers["model"], found.numbers["ours"]) == ("7b", pytest.approx(1.1))
    longest = check("speedup", ClaimedNumber(value=1.2), rows)
    assert (longest.numbers["model"], longest.numbers["ours"]) == ("14b", pytest.approx(1.3))


def test_memory_is_compared_with_settings_as_published_alone() -> None:
    claimed = ClaimedNumber(value=0.264)

    def with_gib(method: str, gib: float, settings: str):
        return with_memory(gib, 10.0, method=method, settings=settings, model=SEVEN, cp_size=1)

    equal = rows_of(with_gib("burst", 40.0, "equal"), with_gib("megatron_cp", 60.0, "equal"))
    assert check("memory", claimed, equal).verdict == "not run"
    published = rows_of(with_gib("burst", 40.0, "as_published"), with_gib("megatron_cp", 60.0, "as_published"))
    found = check("memory", claimed, published)
    assert found.verdict == "partly", "one GPU is not the claimed set-up"
    assert found.numbers["ours"] == pytest.approx(1 / 3)
    worse = rows_of(with_gib("burst", 60.0, "as_published"), with_gib("megatron_cp", 40.0, "as_published"))
    assert check("memory", claimed, worse).verdict == "not"


def test_a_length_under_a_window_is_partly_and_a_causal_one_reproduced() -> None:
    claimed = ClaimedNumber(value=4 << 20, model="7b")
    window = trained("burst", 100.0, seq_len=4 << 20, mask="sliding_window:8191")
    assert check("longest", claimed, rows_of(window)).verdict == "partly"
    assert check("longest", claimed, rows_of(window, trained("burst", 900.0, seq_len=4 << 20))).verdict == "reproduced"
    assert check("longest", claimed, rows_of(trained("burst", 9.0, seq_len=1 << 20))).verdict == "partly"
    small = record(gpu=H200, seq_len=4 << 20)
    assert check("longest", claimed, rows_of(small)).verdict == "not run"


def test_utilisation_that_falls_with_the_gpus_is_not_scaling() -> None:
    claimed = ClaimedNumber(value=64)

    def at(ranks: int, seconds: float):
        return trained("burst", seconds, cp_size=ranks, seq_len=ranks * 32768, gpu=H200)

    held = rows_of(at(1, 4.0), at(4, 10.0))
    few, many = (row["mfu"] for row, _ in held)
    found = check("scaling", claimed, held)
    assert found.numbers["first"] == few
    assert found.numbers["last"] == many
    assert found.verdict == ("partly" if many >= 0.95 * few else "not")
    assert check("scaling", claimed, rows_of(at(1, 4.0), at(4, 40.0))).verdict == "not"
    assert check("scaling", claimed, rows_of(at(1, 4.0))).verdict == "not run"


def test_the_headline_row_is_that_of_whole_checkpointing() -> None:
    found = headline()
    assert (found["headline"], found["whole"], found["half"]) == (118.36, 117.83, 108.82)
    assert found["apart"] < 0.005
    assert found["judgement"] == "within"
    assert found["half_ratio"] == pytest.approx(1.09, abs=0.005)
    assert "an inference" in statements()["sequence_level_speedup"]


def test_the_statements_are_computed_from_the_published_numbers() -> None:
    assert slip()["median"] == pytest.approx(1.024, abs=1e-4)
    counts = samples()
    assert counts["single"] + counts["spread"] == counts["total"]
    assert all("{" not in sentence for sentence in statements().values())
    assert "426eb7a" in statements()["sources"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("check: longest", "check: longets", r"unknown check longets; did you mean longest\?"),
        ('    partly: "burst is', '    partyl: "burst is', r"unknown verdict partyl; did you mean partly\?"),
        ("    said_in: abstract", "    said: abstract", r"unknown key claims\.speedup\.said; did you mean said_in"),
        ("seq_len: 8, model: 4", "seq_len: 8, modle: 4", r"unknown key partly_within\.modle; did you mean model\?"),
        ("seq_len: 8, model: 4", "seq_len: 8", r"partly_within lacks model; add what is missing"),
    ],
)
def test_a_wrong_file_of_claims_gives_one_sentence_with_its_line(tmp_path, old, new, message) -> None:
    text = (ROOT / "results" / "paper" / "claims.yaml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "claims.yaml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UsageError, match=rf"claims.yaml:\d+: .*{message}"):
        read_claims(path)


def test_every_part_that_the_abstract_names_has_a_verdict_from_records_or_a_count(ours) -> None:
    verdicts = {one.name: one.verdict for one in ours}
    assert verdicts["topology"] == "partly"
    assert verdicts["sequence_level_checkpointing"] == "reproduced"
    assert verdicts["fused_head"] == "reproduced"
    assert verdicts["balance"] == "reproduced"
    assert verdicts["falling_utilisation"] == "not run"
    for one in ours:
        if one.name in PART_NAMES - {"falling_utilisation"}:  # those that it had are of a commit that is lost
            assert one.records, one.name
    alone = {one.name: one.verdict for one in judged([])}
    assert {name for name, verdict in alone.items() if verdict != "not run"} == {"balance", "backward_bytes"}
    assert alone["balance"] == "reproduced"


@pytest.mark.parametrize(
    ("changes", "verdict", "far"),
    [
        ({}, "partly", ""),
        ({"cp_size": 4, "seq_len": 1 << 17}, "partly", ""),  # as far as the factors allow
        ({"cp_size": 2}, "not comparable", "2 GPUs for 32"),
        ({"seq_len": 1 << 16}, "not comparable", "64k tokens for 1M"),
    ],
)
def test_a_part_of_a_claim_is_shown_only_within_the_stated_factors(changes: dict, verdict: str, far: str) -> None:
    assert claims().partly_within == Factors(seq_len=8, model=4, gpus=8)
    values = {"settings": "as_published", "model": SEVEN, "seq_len": 1 << 20, "cp_size": 8} | changes

    def said_of(burst: float, other: float):
        pair = [with_memory(gib, 10.0, method=name, **values) for name, gib in (("burst", burst), ("ulysses", other))]
        return {one.name: one for one in judged(rows_of(*pair))}["memory"]

    said = said_of(40.0, 60.0)
    assert said.verdict == verdict
    assert far in said.why
    # Nor is it contradicted from so far away.
    assert said_of(60.0, 40.0).verdict == ("not" if verdict == "partly" else verdict)


def test_a_smaller_model_than_the_factors_allow_shows_nothing_of_a_larger_one() -> None:
    small = read_model(Node("1b", "here"), Path())
    few, many = (trained("burst", 4.0, cp_size=ranks, seq_len=ranks * 32768, model=small) for ranks in (1, 8))
    said = {one.name: one for one in judged(rows_of(few, many))}["scaling"]
    assert said.verdict == "not comparable"
    assert "1b for 14b" in said.why


def test_every_claim_names_the_part_of_a_paper_or_the_file_that_says_it() -> None:
    file = r"[\w./-]+\.\w+ (and [\w./-]+ )?of [\w-]+/[\w-]+"
    source = rf"(abstract of arXiv \d{{4}}\.\d{{5}}(v\d)?|README of [\w-]+/[\w-]+|{file})"
    for name, claim in claims().claims.items():
        assert re.fullmatch(rf"{source}(; {source}, without the number)?", claim.said_in), (name, claim.said_in)


def kept(tail: float, seconds: float, gib: float):
    checkpoint = Checkpoint(every=1, tail=tail)
    return with_memory(gib, seconds, method="burst", model=SEVEN, seq_len=1 << 20, cp_size=8, checkpoint=checkpoint)


@pytest.mark.parametrize(
    ("half_seconds", "half_gib", "verdict"), [(9.0, 20.0, "reproduced"), (9.0, 26.0, "not"), (11.0, 20.0, "not")]
)
def test_kept_outputs_lower_memory_and_save_time_or_the_claim_is_not_reproduced(half_seconds, half_gib, verdict):
    rows = rows_of(kept(0.0, 10.0, 18.0), kept(0.5, half_seconds, half_gib), kept(1.0, 8.0, 25.0))
    found = check("kept_outputs", ClaimedNumber(value=None), rows)
    assert found.verdict == verdict
    assert len(found.trials) == 3
    assert found.numbers["half"] == pytest.approx(half_gib)


def test_a_flat_ring_that_is_faster_contradicts_the_double_ring() -> None:
    def over_nodes(schedule: str, seconds: float):
        one = record(
            method="megatron_cp", seconds=seconds, task="attention", model=SEVEN, dtype="bf16", gpu=A800,
            seq_len=1 << 18, cp_size=4, emulate_nodes=2,
        )  # fmt: skip
        one.measurement.chosen = {"schedule": schedule}
        return one

    slower = check(
        "topology", ClaimedNumber(value=None), rows_of(over_nodes("ring", 1.0), over_nodes("double_ring", 2.0))
    )
    assert slower.verdict == "not"
    assert slower.numbers["faster"] == pytest.approx(0.5)
    faster = check(
        "topology", ClaimedNumber(value=None), rows_of(over_nodes("ring", 2.0), over_nodes("double_ring", 1.0))
    )
    assert faster.verdict == "partly"


def test_the_page_of_the_paper_gives_the_verdicts_of_the_command(tmp_path, monkeypatch, capsys):
    """The command judges the published records of this checkout alone: `results/runs` is not below its directory."""
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"(?s)<!--claims-->(.*?)<!--/-->", page)
    lines = [line for line in shown.splitlines() if line.startswith("| ")][2:]
    on_page = [[cell.replace("\\", "") for cell in line.strip("| ").split(" | ")][:4] for line in lines]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "published").symlink_to(ROOT / "results" / "published")
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "claims", "--json"]) == 0
    by_command = json.loads(capsys.readouterr().out)["claims"]
    assert on_page == [[one[header] for header in ("claim", "said in", "verdict", "why")] for one in by_command]


def test_the_page_links_each_published_run_behind_a_claim_once(ours) -> None:
    for one, line in zip(ours, claims_lines(ours)[2:], strict=False):
        linked = re.findall(r"\]\(\.\./results/published/([\w/-]+)\.jsonl\)", line)
        assert len(linked) == len(set(linked))
        assert bool(linked) == bool(one.records)
        of_claim = [
            [run for run in linked if f"results/published/{run}" in place.file.as_posix()] for place in one.records
        ]
        assert all(of_claim), "a record's run is not linked"
        assert {run for runs in of_claim for run in runs} == set(linked)
