"""The check of training trials passes models with linear layers, and fails ones whose states do not cross ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.linear.scan import StateScan
from engine.models.decoder import Block
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from tests.engine.tasks.test_check_training import checks, fault
from tests.ranks import run_on_ranks
from tests.slow import slow

DELTA = ModelShape(
    name="large hybrid", layers=48, hidden=2048, ffn=5632, heads=16, kv_heads=2, head_dim=32, vocab=151936,
    qk_norm=True, attention_gate=True, layer_pattern="lllf", linear="gated_delta_net", linear_heads=32,
    linear_key_heads=16, linear_key_dim=16, linear_value_dim=16,
)  # fmt: skip
MAMBA = replace(
    DELTA, linear="mamba2", linear_key_heads=1, linear_value_dim=24, attention_gate=False, qk_norm=False,
    window=4096, layer_pattern="lwLF",
)  # fmt: skip
LONG = TrialSettings(task="train", method="burst", model=DELTA, seq_len=1 << 18, cp_size=2, world_size=2, dtype="fp32")
CASES = [
    replace(LONG, checkpoint=Checkpoint(every=4, tail=0.5), mlp_tiles=8),
    replace(LONG, dtype="bf16"),
    replace(LONG, model=MAMBA, checkpoint=Checkpoint(every=8, offload="all", replay="bisect")),
    replace(LONG, model=MAMBA, dtype="bf16", mask="documents", batch_size=2),
    replace(LONG, method="ulysses", model=MAMBA, dtype="fp64"),
]


def states_lost(cases: list[TrialSettings]) -> list[dict[str, Any]]:
    def nothing(scan: StateScan, map_BVNN: Tensor, state_BVNP: Tensor, *, reverse: bool = False) -> Tensor:
        return torch.zeros_like(state_BVNP)

    StateScan.exclusive = nothing  # type: ignore[method-assign]
    return checks(cases)


def moved_twice(cases: list[TrialSettings]) -> list[dict[str, Any]]:
    """Every linear layer moves tokens to consecutive order, also where the layer before has done so."""
    Block.enters = property(lambda block: block.linear, lambda block, _: None)  # type: ignore[assignment]
    return checks(cases)


@pytest.mark.parametrize("cases", [[CASES[1], CASES[3]], *slow([CASES[0], CASES[2], CASES[4]])], ids=["few", "others"])
def test_hybrids_take_the_step_of_a_dense_run(cases: list[TrialSettings]) -> None:
    for settings, found in zip(cases, run_on_ranks(2, checks, cases)[0], strict=True):
        assert fault(settings, found) == "", settings


@pytest.mark.parametrize("settings", [CASES[0], CASES[2]], ids=["delta", "mamba"])
def test_a_state_that_does_not_cross_ranks_is_wrong(settings: TrialSettings) -> None:
    [found] = run_on_ranks(2, states_lost, [settings])[0]
    assert fault(settings, found) != ""


def test_linear_layers_in_a_row_are_checked_in_a_row() -> None:
    [found] = run_on_ranks(2, moved_twice, [CASES[0]])[0]
    assert fault(CASES[0], found) != ""
