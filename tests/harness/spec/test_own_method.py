"""docs/own-method.md: the example runs as the page says, is compared with float64, and is reported under its name."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from examples.own_method import METHOD
from harness.cli import main
from harness.records.stored import read_records
from harness.spec import methods

ROOT = Path(__file__).parents[3]
MASKS = ROOT / "results" / "published" / "cpu" / "attention_masks.jsonl"
PAGE = (ROOT / "docs" / "own-method.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page's first run leaves."""
    place = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        registry = methods._registry() | {METHOD.name: ("examples.own_method", METHOD)}
        patch.setattr(methods, "_registry", lambda: registry)
        patch.chdir(ROOT)
        command = ["run", "experiments/quickstart.yaml", "--scale", "smoke"]
        assert " ".join(command) in PAGE
        chosen = ["--set", f"sweep.method=[burst, {METHOD.name}]", "--out", str(place / "mine")]
        only = [f"--only=*-{name}-*" for name in (METHOD.name, "burst-s256-cp2")]
        assert main([*command, *chosen, *only, "--launcher", "local"]) == 0
    return place / "mine"


def test_the_example_computes_attention_on_one_and_two_ranks(run_dir: Path) -> None:
    own = [record for record in read_records(run_dir) if record.settings.method == METHOD.name]
    assert {(record.settings.task, record.settings.cp_size) for record in own} == {
        (task, ranks) for task in ("train", "attention") for ranks in (1, 2)
    }
    for record in own:
        assert (record.status, record.reason) == ("ok", "")
        assert record.measurement is not None
        if record.settings.task == "attention":
            assert {"out", "dq", "dk", "dv"} <= record.measurement.extra["error"].keys()


def test_it_is_reported_as_ours_against_each_other_method(run_dir: Path, tmp_path: Path) -> None:
    assert f"--subject {METHOD.name} --label {METHOD.name}=Ours" in PAGE
    out = tmp_path / "paper"
    assert (
        main(["report", str(run_dir), "--subject", METHOD.name, "--label", f"{METHOD.name}=Ours", "--out", str(out)])
        == 0
    )
    with open(out / "tables" / "comparison.csv", newline="") as file:
        assert {(line["method"], line["beside"].partition(" (")[0]) for line in csv.DictReader(file)} >= {
            ("Ours", "burst")
        }


def test_the_example_is_as_short_as_the_page_says_and_refuses_what_it_cannot(run_dir: Path) -> None:
    code = re.sub(r'"""(?s:.)*?"""', "", (ROOT / "examples" / "own_method.py").read_text(encoding="utf-8"))
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    trials = [record.settings for path in (MASKS, run_dir) for record in read_records(path)]
    assert {trial.mask for trial in trials if METHOD.refuse(trial) is None} == {"causal"}
