"""The Trainer of transformers on ranks that share sequences takes the steps of one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytest.importorskip("accelerate", reason="the Trainer needs it: extra `test` has it")


def losses(ranks: int) -> list[float]:
    """What the example prints on so many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launcher, "examples/transformers_trainer.py"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    found = re.search(r"ranks: losses (.*); evaluation (.*)", done.stdout)
    assert found, done.stdout + done.stderr
    return [float(each) for each in (*found[1].split(", "), found[2])]


def test_losses_and_evaluation_on_two_ranks_are_those_of_one() -> None:
    assert losses(2) == pytest.approx(losses(1), abs=2e-5)
