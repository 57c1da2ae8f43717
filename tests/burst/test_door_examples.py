"""Programs of `examples/` in other people's trainers take the same steps on two ranks as on one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {  # by program, the packages that it needs
    "megatron_core.py": ("megatron.core",),
    "nemo_sharder.py": ("nemo_automodel", "transformers"),
    "torchtitan_override.py": ("torchtitan", "triton"),  # which it imports also on CPUs
    "verl_log_probabilities.py": ("verl", "tensordict", "transformers"),
}


def losses(program: str, ranks: int) -> list[float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launcher, f"examples/{program}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = re.search(r"ranks: losses (.*)", done.stdout)
    assert found, done.stdout + done.stderr
    return [float(each) for each in found[1].split(", ")]


@pytest.mark.slow
@pytest.mark.parametrize("program", list(PROGRAMS))
def test_losses_on_two_ranks_are_those_of_one(program: str) -> None:
    for package in PROGRAMS[program]:
        pytest.importorskip(package, reason=f"examples/{program} needs it")
    assert losses(program, 2) == pytest.approx(losses(program, 1), abs=2e-5)
