"""Steps under plans of the planner beside dense float64 and beside the same values set by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.checkpoint.planning.memory import memory_of
from engine.checkpoint.planning.memory_settings import left_open
from engine.checkpoint.planning.plan import Budget, SearchGrid, planned
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from tests.engine.parity import dense_run, errors, parallel_runs
from tests.ranks import run_on_ranks
from tests.slow import slow

# Sequences long enough for a budget to be spent on layers, on a tail, and on part of an MLP.
SHAPE = ModelShape(name="deep", layers=4, hidden=24, ffn=80, heads=4, kv_heads=2, head_dim=8, vocab=257)
ASKED = left_open(
    TrialSettings(
        task="train", method="burst", model=SHAPE, seq_len=192, dtype="fp64", checkpoint=Checkpoint(plan="auto")
    ),
    (),
)
SMALL_TILES = SearchGrid(mlp_tiles=(1, 3), projection_tiles=(1, 3), every=(1, 2))


def plans(world_size: int) -> dict[str, TrialSettings]:
    """Different plans for budgets between the least that can be kept and everything."""
    asked = dataclasses.replace(ASKED, world_size=world_size, cp_size=world_size)
    found = {}
    least = memory_of(planned(asked, Budget(gpu=1.0), grid=SMALL_TILES)[0])
    most = memory_of(planned(asked, Budget(gpu=float("inf")), grid=SMALL_TILES)[0])
    for step in range(13):
        part = step / 12
        budget = 1.011 * (least.reserved + part * (most.reserved - least.reserved))
        settings, forecast = planned(asked, Budget(gpu=budget), grid=SMALL_TILES)
        if forecast.fits:
            found[str(dataclasses.astuple(settings.checkpoint)) + f"{settings.mlp_tiles}"] = settings
    return found


def by_hand(settings: TrialSettings) -> TrialSettings:
    return dataclasses.replace(settings, planned="", checkpoint=dataclasses.replace(settings.checkpoint, plan="hand"))


@pytest.mark.parametrize("world_size", [1, *slow(2)])
def test_every_plan_gives_the_gradients_of_a_dense_run_and_those_by_hand(world_size: int) -> None:
    cases = plans(world_size)
    assert len(cases) >= 4
    assert len({settings.checkpoint.whole_layers for settings in cases.values()}) >= 3
    cases |= {f"{name} by hand": by_hand(settings) for name, settings in cases.items()}
    [results, *_] = run_on_ranks(world_size, parallel_runs, cases)
    truth = dense_run(ASKED, torch.float64)
    for name, result in results.items():
        assert max(errors(result, truth).values()) < 1e-10, name
        if not name.endswith("by hand"):
            assert result["loss"] == results[f"{name} by hand"]["loss"]
