"""Programs of `examples/` in other people's trainers take the same steps on two ranks as on one."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {"megatron_core.py": "megatron.core"}  # by program, the package that it needs


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
    package = PROGRAMS[program].split(".")
    if importlib.util.find_spec(package[0]) is None or importlib.util.find_spec(PROGRAMS[program]) is None:
        pytest.skip(f"examples/{program} needs {PROGRAMS[program]}: extra `test` has it")
    assert losses(program, 2) == pytest.approx(losses(program, 1), abs=2e-5)
