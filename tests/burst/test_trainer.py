"""The Trainer of transformers on ranks that share sequences takes the steps of one process, with its predictions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.burst.programs import transformers_trainer
from tests.ranks import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("accelerate", reason="the Trainer needs it: extra `test` has it")


@pytest.mark.parametrize("fsdp", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ddp", "fsdp2"])
def test_steps_evaluation_metrics_and_predictions_on_two_ranks_are_those_of_one(fsdp: bool, tmp_path: Path) -> None:
    expected = run_on_ranks(1, transformers_trainer, False, str(tmp_path / "one"))[0]
    found = run_on_ranks(2, transformers_trainer, fsdp, str(tmp_path / "two"))[0]
    for name in ("predictions", "labels"):
        np.testing.assert_allclose(found.pop(name), expected.pop(name), atol=1e-5)
    expected = {key: value for key, value in expected.items() if key in found or not fsdp}
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


EXAMPLES = ("transformers_trainer", "lora", "trl_sft", "trl_dpo", "trl_grpo")


def printed(example: str, ranks: int) -> list[float]:
    """The numbers that an example prints on so many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launcher, f"examples/{example}.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = re.search(r"ranks?: (.*)", done.stdout)
    assert found, done.stdout + done.stderr
    return [float(each) for each in re.findall(r"-?\d+\.\d+", found[1])]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_prints_the_same_on_one_rank_and_on_two(example: str) -> None:
    for package in ("trl", "peft"):
        if package in (ROOT / f"examples/{example}.py").read_text():
            pytest.importorskip(package, reason=f"the example trains with it: pip install {package}")
    assert printed(example, 2) == pytest.approx(printed(example, 1), abs=2e-5)
