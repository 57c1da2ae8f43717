"""The published records pass `burst verify`: figures can be computed again, and tables state the gaps."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from harness.records.stored import run_named, runs_below, stored_run
from harness.report.page import read_runs
from harness.verify.finding import Verdict
from harness.verify.history import History
from harness.verify.verdict import verify

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "published"


@pytest.fixture(scope="module")
def verdicts() -> list[Verdict]:
    return verify(PUBLISHED, History())


def test_every_published_run_holds(verdicts: list[Verdict]) -> None:
    assert len(verdicts) == len(runs_below(PUBLISHED)) > 10
    assert [f"{one.run}: {failure}" for one in verdicts for failure in one.failures] == []


def test_every_published_row_has_its_command_and_what_it_cannot_show_beside_its_numbers(
    verdicts: list[Verdict],
) -> None:
    for verdict in verdicts:
        rows = {row["trial_id"]: row for row in read_runs([run_named(PUBLISHED, verdict.run)])[1]}
        commands = ("burst run experiments/", "burst reproduce ")
        assert all(row["run_command"].startswith(commands) for row in rows.values()), verdict.run
        for gap in verdict.stated:
            assert gap.says in rows[gap.place]["caveats"], (verdict.run, gap)


# Folders, words by which the index states a condition of their runs, and words for it in their provenance.yaml.
_CONDITIONS = [
    ("*", "at the same time", "at the same time|had a GPU of their own"),
    ("*", "another build", "another build"),
    ("*", "[Ee]nded in its second round", "ended in its second round"),
    ("*", "the last was ended by the clock|time was over|time of the run was over", "ended by the clock|time was over"),
    ("h200x1/cp_scaling", "of cp_scaling was ended by the clock", "ended by the clock"),
    ("*", "without flash-attn-4|without FlashAttention-4", "FlashAttention-4"),
    ("*", "(two|three) machines", "the first machine of (two|three)"),
    ("*", "as two nodes of", "the nodes are GPUs of one host"),
    ("*", "locked host memory", "locked host memory"),
    ("*", "125 GiB of host memory", "125 GiB of host memory"),
    ("*", "warm-up step of 16K tokens", "the warm-up step had 16K tokens"),
    ("*", "in this record they were whole", "projections were whole"),
    ("*", "come from three runs", "one of three runs"),
    ("h200x4/attention_two_nodes*", "measured the link once", "measured once per trial"),
    ("*", "Other programs ran on the host", "other programs on the host"),
    ("*", "Times on shared CPU cores", "times on shared CPU cores"),
]


def _index() -> dict[str, str]:
    """What the index says of each published run: its row, and the notes whose heading names it."""
    index = (PUBLISHED / "README.md").read_text("utf-8")
    said = {stored_run(one).report_dir.relative_to(PUBLISHED).as_posix(): "" for one in runs_below(PUBLISHED)}
    for row in re.findall(r"^\| \[.*$", index, re.MULTILINE):
        folders = row.split(" | ")[0]
        host = folders[len("| [") :].split("/")[0]
        for name in re.findall(r"\[(?:\w+/)?(\w+)\]", folders):
            if f"{host}/{name}" in said:
                said[f"{host}/{name}"] += row
    for heading, notes in re.findall(r"^## Notes on (.*?)\n(.*?)(?=^## |\Z)", index, re.MULTILINE | re.DOTALL):
        host, names = heading.split("/")
        for run in said:
            if any(fnmatchcase(run, f"{host}/{name}") for name in names.split(", ")):
                said[run] += notes
    return said


def test_conditions_that_the_index_states_stand_in_provenance_and_in_the_rows() -> None:
    index = _index()
    assert [run for run, words in index.items() if not words] == []
    missing, told = [], 0
    for run, words in index.items():
        path = run_named(PUBLISHED, run)
        stated = stored_run(path).stated()
        conditions = [one.says for one in stated.reasons if "conditions" in one.about]
        conditions += [one.machine for one in stated.machines]
        rows = " ".join(str(row["caveats"]) for row in read_runs([path])[1])
        for folders, in_index, in_provenance in _CONDITIONS:
            if fnmatchcase(run, folders) and re.search(in_index, words):
                told += 1
                if not any(re.search(in_provenance, one) for one in conditions) or not re.search(in_provenance, rows):
                    missing.append(f"{run}: {in_index}")
    assert missing == []
    assert told > 30, "the index has other words for conditions now"
