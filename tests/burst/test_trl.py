"""Trainers of TRL on ranks that share sequences log what they log in one process, and end with its parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.burst.programs import llama, train
from tests.ranks import run_on_ranks

pytest.importorskip("trl", reason="its trainers are tested: pip install trl peft")
KINDS = ("SFT packed", "SFT padded", "SFT LoRA", "DPO", "GRPO")


@pytest.mark.slow
def test_two_ranks_log_what_one_process_logs(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    expected, found = (run_on_ranks(ranks, train, KINDS, str(tmp_path))[0] for ranks in (1, 2))
    for kind in KINDS:
        assert found[kind] == pytest.approx(expected[kind], rel=1e-4, abs=1e-5), kind
