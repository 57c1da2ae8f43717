"""A training step of a model with linear layers and attention equals that of one process in float64: loss, every
gradient and every updated parameter, however the ranks share the sequence and whatever is computed again."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from tests.engine.parity import apart, dense_parameters, dense_run, errors, parallel_runs
from tests.ranks import run_on_ranks
from tests.slow import slow

DELTA = ModelShape(
    name="hybrid", layers=5, hidden=18, ffn=30, heads=4, kv_heads=2, head_dim=4, vocab=257, attention_gate=True,
    qk_norm=True, layer_pattern="lLf", linear="gated_delta_net", linear_heads=4, linear_key_heads=2, linear_key_dim=4,
    linear_value_dim=5, rope_scaling="default:partial_rotary_factor=0.5",
)  # fmt: skip
MAMBA = replace(DELTA, linear="mamba2", attention_gate=False, qk_norm=False, layer_pattern="FlwL", window=9)
SMALL = replace(DELTA, layers=2, attention_gate=False, qk_norm=False, layer_pattern="lf")
SHAPES = {"delta": DELTA, "mamba": MAMBA}
SETTINGS = TrialSettings(task="train", method="burst", model=DELTA, seq_len=48, batch_size=2, dtype="fp64")
TILED = {"projection_tiles": 3, "mlp_tiles": 2}
PLANS: dict[str, dict[str, Any]] = {
    "kept": {"checkpoint": Checkpoint(every=0, mlp=0.4), "layout": "zigzag"},
    "recomputed, tail": {"checkpoint": Checkpoint(every=1, tail=0.35), "layout": "split_zigzag", **TILED},
    "groups": {"checkpoint": Checkpoint(every=3, tail=1.0), "layout": "striped", "schedule": "ring"},
    "groups on the host": {
        "checkpoint": Checkpoint(every=2, tail=0.5, offload="all"), "layout": "contiguous", **TILED,
    },
    "bisected, some kept": {
        "checkpoint": Checkpoint(every=4, tail=0.5, offload="inputs", replay="bisect", whole_layers=1),
    },
    "documents": {"mask": "documents:7,17,1,5,...", "checkpoint": Checkpoint(every=2)},
    "packed": {"mask": "documents", "checkpoint": Checkpoint(every=2, tail=0.5), "layout": "balanced"},
    "packed, accumulated": {"mask": "documents", "batch_size": 1, "gradient_accumulation": 2},
    "accumulated": {"batch_size": 1, "gradient_accumulation": 2, "checkpoint": Checkpoint(every=3, offload="all")},
}  # fmt: skip


def cases_of(world_size: int) -> dict[str, TrialSettings]:
    cases = {}
    for (shape, model), (plan, choices) in ((a, b) for a in SHAPES.items() for b in PLANS.items()):
        if plan == "documents" and any(model.windowed):
            continue  # windows of layers take masks causal and documents
        sizes = {"world_size": world_size, "cp_size": world_size} | choices
        cases[f"{shape}: {plan}"] = replace(SETTINGS, model=model, **sizes)
    if world_size == 4:
        cases["delta: two replicas"] = replace(SETTINGS, world_size=4, cp_size=2, schedule="ulysses", batch_size=1)
    return cases


def every(number: int, cases: dict[str, TrialSettings]) -> dict[str, TrialSettings]:
    return {name: case for place, (name, case) in enumerate(cases.items()) if place % number == 0}


@pytest.mark.parametrize(
    ("world_size", "step", "updates"),
    [(1, 9, 2), (2, 8, 0), (4, 7, 0), *slow((1, 1, 2), (2, 1, 2), (4, 1, 2), (8, 4, 0))],
)
def test_loss_gradients_and_updates_are_those_of_one_process(world_size: int, step: int, updates: int) -> None:
    compare(world_size, every(step, cases_of(world_size)), updates)


@pytest.mark.parametrize("world_size", [2, 4])
def test_documents_that_begin_just_before_a_rank_see_nothing_of_others(world_size: int) -> None:
    """The short convolution has 4 taps, so a rank receives 3 tokens."""
    cases = {}
    for kind, (seq_len, before) in product(("gated_delta_net", "mamba2"), ((48, 1), (48, 2), (48, 3), (12, 1))):
        first = seq_len // world_size - before
        for lengths in ((first, seq_len - first), (first - 1, 1, seq_len - first)):
            mask = "documents:" + ",".join(map(str, lengths))
            sizes = {"world_size": world_size, "cp_size": world_size, "seq_len": seq_len}
            cases[f"{kind}: {mask}"] = replace(SETTINGS, model=replace(SMALL, linear=kind), mask=mask, **sizes)
    compare(world_size, cases)


def compare(world_size: int, cases: dict[str, TrialSettings], updates: int = 0) -> None:
    """Loss and gradients of each case with those of one process, and parameters after so many optimizer steps."""
    found = run_on_ranks(world_size, parallel_runs, cases, updates)[0]
    wrong = {}
    for name, settings in cases.items():
        truth = dense_run(settings, torch.float64)
        wrong |= {f"{name}: {key}": off for key, off in errors(found[name], truth).items() if not off < 1e-10}
        for key, expected in dense_parameters(settings, updates).items() if updates else ():
            if not (off := apart(found[name]["parameters"][key], expected)) < 1e-9:
                wrong[f"{name}: updated {key}"] = off
    assert wrong == {}
