"""The published records pass `burst verify`: figures can be computed again, and tables state the gaps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.records.stored import run_named, runs_below, stored_run
from harness.report.page import read_runs
from harness.verify.finding import RunVerification
from harness.verify.provenance import CommitHistory
from harness.verify.verdict import verify

ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT / "results" / "published"


@pytest.fixture(scope="module")
def verdicts() -> list[RunVerification]:
    return verify(PUBLISHED, CommitHistory())


def test_every_published_run_holds(verdicts: list[RunVerification]) -> None:
    assert len(verdicts) == len(runs_below(PUBLISHED)) > 10
    assert [f"{one.run}: {failure}" for one in verdicts for failure in one.failures] == []


def test_every_published_row_has_its_command_and_what_it_cannot_show_beside_its_numbers(verdicts):
    for verdict in verdicts:
        rows = {row["trial_id"]: row for row in read_runs([run_named(PUBLISHED, verdict.run)])[1]}
        commands = ("burst run experiments/", "burst reproduce ")
        assert all(row["run_command"].startswith(commands) for row in rows.values()), verdict.run
        for gap in verdict.stated:
            if gap.check == "trials":  # without a record no row
                continue
            assert gap.says in rows[gap.place]["caveats"], (verdict.run, gap)


# What a reader has to know of a run, in words of its provenance, and the runs that it holds for.
_CONDITIONS = {
    "times on shared CPU cores": ["cpu/attention_precision"],
    "other programs on the host": ["cpu/checkpoint_tail"],
    "at the same time|had a GPU of their own": [
        "h200x1/checkpointing_memory_analytic",
        "h200x1/cp_scaling",
        "h200x1/e2e_main",
        "h200x1/kernel_single_node",
        "h200x1/lm_head_memory_analytic",
        "h200x1/memory_budget_by_hand",
        "h200x1/sparse",
        "h200x4/checkpoint_tail",
        "h200x4/lm_head",
        "h200x4/longest_sequence",
        "h200x4/memory_levers",
    ],
    "ended by the clock": ["h200x1/cp_scaling"],
    "another build": ["h200x1/one_gpu_systems", "h200x2/node_systems_two_megatron", "h200x2/two_nodes_systems"],
    "the first machine of (two|three)": ["h200x1/one_gpu_systems", "h200x1/one_gpu_systems_8b"],
    "125 GiB of host memory": ["h200x1/one_gpu_systems_8b"],
    "ended by the clock|time was over": [
        "h200x1/one_gpu_systems_long",
        "h200x2/node_systems_two_megatron",
        "h200x4/attention_schedules",
        "h200x4/million_tokens",
    ],
    "ended in its second round": [
        "h200x2/attention_node_grouped",
        "h200x2/attention_systems",
        "h200x2/two_nodes_flash",
        "h200x2/two_nodes_systems",
    ],
    "FlashAttention-4": ["h200x2/training_node_small_ring", "h200x2/two_nodes_systems"],
    "locked host memory": ["h200x2/training_node_two_longest"],
    "trials of a setting that was removed later": ["h200x2/attention_short", "h200x2/two_nodes_overlap"],
    "the nodes are GPUs of one host": [
        "h200x2/two_nodes_overlap",
        "h200x2/two_nodes_systems",
        "h200x4/attention_two_nodes",
        "h200x4/attention_two_nodes_grouped",
    ],
    "measured once per trial": ["h200x4/attention_two_nodes", "h200x4/attention_two_nodes_grouped"],
    "the warm-up step had 16K tokens": ["h200x4/million_tokens", "h200x4/training_8b"],
    "projections were whole": ["h200x4/million_tokens"],
    "one of three runs": ["h200x4/quickstart"],
}


@pytest.mark.parametrize("words", _CONDITIONS)
def test_conditions_of_a_run_stand_in_its_provenance_and_in_its_rows(words: str) -> None:
    for run in _CONDITIONS[words]:
        path = run_named(PUBLISHED, run)
        stated = stored_run(path).stated()
        conditions = [one.says for one in stated.reasons if "conditions" in one.about]
        conditions += [one.machine for one in stated.machines]
        assert any(re.search(words, one) for one in conditions), run
        assert re.search(words, " ".join(str(row["caveats"]) for row in read_runs([path])[1])), run
