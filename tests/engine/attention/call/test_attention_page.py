"""The code of docs/attention.md runs as it is printed, alone and under torchrun, and trains alike on both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import AMPLE

ROOT = Path(__file__).parents[4]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "attention.md").read_text("utf-8"), re.M | re.S)

# After the first block: the loss of the whole sequence, and the norm of a gradient that wrong positions change by 8%.
RESULT = """
total = loss.detach().clone()
if cp.size > 1:
    dist.all_reduce(total)
print(f"trained {total.item():.8g} {model.q.weight.grad.norm().item():.8g}", flush=True)
"""
LIBRARY_CALL = """
assert torch.allclose(out, burst_attention(q, k, v, mask=mask, cp=cp), atol=1e-5)  # `out` is of the library's call
"""


def trained_by(program: Path, ranks: int) -> list[tuple[float, float]]:
    """What each rank printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    ended = subprocess.run(
        [sys.executable, *launcher, program], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=AMPLE, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return [(float(loss), float(norm)) for loss, norm in re.findall(r"trained ([-+.e\d]+) ([-+.e\d]+)", ended.stdout)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "train.py"
    first, *others = BLOCKS
    path.write_text("\n".join([first, RESULT, *others, LIBRARY_CALL]), encoding="utf-8")
    return path


@pytest.mark.slow  # programs that import torch and train, one after another
def test_the_code_of_the_page_trains_alike_alone_and_on_two_ranks(program: Path) -> None:
    assert len(BLOCKS) == 5
    [alone] = trained_by(program, 1)
    assert trained_by(program, 2) == [pytest.approx(alone, rel=1e-4)] * 2
