"""Trainers of TRL on ranks that share sequences log what they log in one process, and end with its parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.burst.programs import llama, train
from tests.ranks import run_on_ranks

pytest.importorskip("trl", reason="its trainers are tested: pip install trl peft")
KINDS = ("SFT packed", "SFT padded", "SFT LoRA", "DPO", "GRPO")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "ranks", "sizes", "fsdp"),
    [(1, 2, {"cp_size": 2}, False), (1, 2, {"cp_size": 2}, True), (2, 4, {"cp_size": 2, "dp_shard_size": 2}, False)],
)
def test_what_is_logged_is_that_of_processes_with_whole_sequences(
    batches: int, ranks: int, sizes: dict[str, int], fsdp: bool, tmp_path: Path
) -> None:
    llama().save_pretrained(tmp_path)
    expected = run_on_ranks(batches, train, KINDS, str(tmp_path), {})[0]
    found = run_on_ranks(ranks, train, KINDS, str(tmp_path), sizes, fsdp)[0]
    for kind in KINDS:
        assert found[kind] == pytest.approx(expected[kind], rel=1e-4, abs=1e-5), kind
