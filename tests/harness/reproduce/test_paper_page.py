"""docs/paper.md beside the code whose answers it repeats: verdicts on figures, predicted minutes, counts of claims."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from harness.machine.this_machine import imagined
from harness.metrics.hardware import hardware_named
from harness.plan.forecast import cost_of, forecast
from harness.plan.matrix import plan
from harness.reproduce.claims import judged
from harness.reproduce.comparison import beside, verdict
from harness.reproduce.figures import paper_figures
from harness.reproduce.points import MeasuredRun, all_rows, runs_in
from harness.spec.experiment import load_experiment
from tests.slow import slow

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
FIGURE = r"^\| `(\w+)` \| [^|]+ \| (\d+) \| (\d+) \| ([\w ]+) \|$"
LISTED = {match[0]: match[1:] for match in re.findall(FIGURE, PAGE, re.MULTILINE)}
H200 = hardware_named("h200")
HOST = imagined(H200.gpu_names[0], H200.memory_gib)


@pytest.fixture(scope="module")
def published() -> list[MeasuredRun]:
    return runs_in([ROOT / "results" / "published"])


def minutes(figure: str, scale: str) -> float:
    """Predicted for the trials that fit, as `burst plan` prints it."""
    experiment = load_experiment(paper_figures()[figure].experiment, scale)
    planned = [trial for trial in plan(experiment, HOST, [], hardware=H200) if trial.unsupported_reason is None]
    fit = [trial.settings for trial in planned if forecast(trial.settings, H200, plan=trial.plan).fits is not False]
    return cost_of(fit, H200, rounds=experiment.rounds).seconds / 60


def test_every_figure_is_on_the_page() -> None:
    assert set(LISTED) == set(paper_figures())


LARGE = ("e2e_main", "cp_scaling")  # the planner takes seconds for each


@pytest.mark.parametrize("figure", [*(each for each in LISTED if each not in LARGE), *slow(*LARGE)])
def test_the_page_says_what_a_figure_costs_and_its_verdict(figure: str, published: list[MeasuredRun]) -> None:
    one_gpu, node, said = LISTED[figure]
    for scale, shown in (("one_gpu", one_gpu), ("node", node)):
        assert minutes(figure, scale) == pytest.approx(int(shown), rel=0.1, abs=1), scale
    assert verdict(beside(paper_figures()[figure], published))[0] == said


def test_the_state_in_five_lines_counts_the_verdicts(published: list[MeasuredRun]) -> None:
    found = Counter(one.verdict for one in judged(all_rows(published)))
    assert found == {"reproduced": 5, "partly": 1, "not comparable": 5, "not run": 5}
    for words in (
        "**Five claims are reproduced**",
        "**One is partly reproduced**",
        "**Five have only been",
        "**Five have not been",
    ):
        assert words in PAGE
