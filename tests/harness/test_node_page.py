"""docs/multi-gpu.md beside the plans of the runs that it lists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.machine.this_machine import imagined
from harness.metrics.hardware import hardware_named
from harness.plan.forecast import cost_of, forecast
from harness.plan.matrix import plan
from harness.spec.experiment import load_experiment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "multi-gpu.md").read_text(encoding="utf-8")
ROW = r"^\| (\d+) \| `([\w/]+)` \| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+|-) \| "
LISTED = [match.groups() for match in re.finditer(ROW, PAGE, re.MULTILINE)]
H200 = hardware_named("h200")
HOST = imagined(H200.gpu_names[0], H200.memory_gib)


def test_the_list_is_numbered_without_a_gap() -> None:
    assert [int(row[0]) for row in LISTED] == list(range(1, len(LISTED) + 1))
    assert len(LISTED) >= 16


@pytest.mark.parametrize("row", LISTED, ids=lambda row: f"{row[1]}-{row[2]}")
def test_a_run_of_the_list_fits_and_takes_what_the_page_says(row: tuple[str, ...]) -> None:
    _, file, scale, trials, rounds, seconds, gib = row
    experiment = load_experiment(ROOT / "experiments" / f"{file}.yaml", scale)
    planned = plan(experiment, HOST, [], hardware=H200)
    assert {trial.unsupported_reason for trial in planned} == {None}
    assert max(trial.settings.world_size for trial in planned) <= 4
    assert (len(planned), experiment.repetition.rounds) == (int(trials), int(rounds))
    found = [forecast(trial.settings, H200, plan=trial.plan) for trial in planned]
    assert all(one.fits is not False for one in found)
    assert experiment.limits.share_ranks
    settings = [trial.settings for trial in planned]
    cost = cost_of(settings, H200, rounds=experiment.repetition.rounds, share_ranks=True)
    assert (cost.unknown, f"{cost.seconds:.0f}") == (0, seconds)
    if gib != "-":
        assert f"{max(one.gpu_gib or 0.0 for one in found):.0f}" == gib


@pytest.mark.parametrize("row", LISTED, ids=lambda row: f"{row[1]}-{row[2]}")
def test_no_trial_of_the_list_is_longer_than_a_call_of_ten_minutes(row: tuple[str, ...]) -> None:
    experiment = load_experiment(ROOT / "experiments" / f"{row[1]}.yaml", row[2])
    for trial in plan(experiment, HOST, [], hardware=H200):
        assert cost_of([trial.settings], H200).seconds < 600


def test_every_scale_of_the_nodes_experiment_but_the_smallest_is_listed() -> None:
    scales = re.findall(
        r"^  (\w+):", (ROOT / "experiments/training_node.yaml").read_text().partition("scales:")[2], re.M
    )
    listed = {row[2] for row in LISTED if row[1] == "training_node"}
    assert listed == set(scales) - {"smoke"}
