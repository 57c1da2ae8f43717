"""Programs of `examples/` in other people's trainers take the same steps on two ranks as on one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {  # by program, the packages that it needs
    "lora.py": ("peft", "accelerate"),
    "megatron_core.py": ("megatron.core",),
    "nemo_sharder.py": ("nemo_automodel", "transformers"),
    "torchtitan_override.py": ("torchtitan", "triton"),  # which it imports also on CPUs
    "transformers_trainer.py": ("transformers", "accelerate"),
    "trl_dpo.py": ("trl",),
    "trl_grpo.py": ("trl",),
    "trl_sft.py": ("trl",),
    "verl_log_probabilities.py": ("verl", "tensordict", "transformers"),
}


def printed(program: str, ranks: int) -> list[float]:
    """The numbers of the line that says how many ranks there are: losses, and what is beside them."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *launcher, f"examples/{program}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = re.search(r"ranks: (.*)", done.stdout)
    assert found, done.stdout + done.stderr
    return [float(each) for each in re.findall(r"-?\d+\.\d+", found[1])]


@pytest.mark.slow
@pytest.mark.parametrize("program", list(PROGRAMS))
def test_losses_on_two_ranks_are_those_of_one(program: str) -> None:
    for package in PROGRAMS[program]:
        pytest.importorskip(package, reason=f"examples/{program} needs it")
    assert printed(program, 2) == pytest.approx(printed(program, 1), abs=2e-5)
