"""After a shorter warm-up one linear layer runs at full length before the first measured step, and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.tasks.train
from engine.linear.shard import LinearShard
from engine.settings import Checkpoint, Steps, TrialSettings
from tests.engine.linear.test_hybrid_step import DELTA, MAMBA
from tests.engine.parity import task_of, whole_of
from tests.ranks import run_on_ranks
from tests.slow import slow

SETTINGS = TrialSettings(
    task="train", method="burst", model=DELTA, seq_len=48, batch_size=2, dtype="fp32",
    steps=Steps(warmup=1, measured=1, warmup_seq_len=16),
)  # fmt: skip
KEPT, AGAIN = Checkpoint(every=0), Checkpoint(every=1)
HOST = Checkpoint(every=3, offload="all", whole_layers=1)
HALVES = Checkpoint(every=4, offload="inputs", replay="bisect")
NODES = {"sharding": "hybrid", "emulate_nodes": 2, "batch_size": 1, "gradient_accumulation": 2}
# By number of ranks and case: settings, and how often the recurrence of the layer runs forward.
CASES: dict[int, dict[str, tuple[dict[str, Any], int]]] = {
    1: {
        "kept": ({"checkpoint": KEPT, "dtype": "bf16"}, 1),
        "groups on the host": ({"checkpoint": HOST, "mlp_tiles": 2, "model": MAMBA}, 2),
        "whole warm-up": ({"steps": Steps(warmup=1, measured=1)}, 0),
        "no warm-up": ({"steps": Steps(warmup=0, measured=1, warmup_seq_len=16)}, 0),
    },
    2: {
        "again": ({"checkpoint": AGAIN, "model": MAMBA, "cp_size": 2}, 2),
        "nodes": ({"checkpoint": HALVES, "dtype": "bf16", "cp_size": 2, **NODES}, 2),
    },
    4: {"replicas": ({"checkpoint": HOST, "cp_size": 2, "layout": "striped"}, 2), "kept": ({"checkpoint": KEPT}, 1)},
}


def cases_of(world_size: int) -> dict[str, tuple[TrialSettings, int]]:
    cases = CASES[world_size].items()
    return {
        name: (replace(SETTINGS, world_size=world_size, **changes), forwards) for name, (changes, forwards) in cases
    }


def run_of(settings: TrialSettings, tunes: bool) -> dict[str, Any]:
    """What a run measured and left, and, each in its order, `step` for a forward of the model, the tokens of each
    forward of a recurrence and their negative for each backward; and what the layer's run left behind."""
    _, task = task_of(settings)
    seen: list[Any] = []
    left: list[str] = []
    recurrence, tune = LinearShard.recurrence, engine.tasks.train.tune_linear_layers

    def noted(shard: LinearShard, *tensors: Tensor) -> Tensor:
        out, tokens = recurrence(shard, *tensors), tensors[0].shape[1]
        seen.append(tokens)
        if out.requires_grad:
            out.register_hook(lambda _: seen.append(-tokens))
        return out

    def watched(model: Any, like_BLE: Tensor) -> None:
        random, activations = torch.get_rng_state(), [block.activations for block in model.blocks]
        tune(model, like_BLE)
        left.extend(["random state"] * (not random.equal(torch.get_rng_state())))
        left.extend(["activations"] * (activations != [block.activations for block in model.blocks]))
        left.extend(["saved"] * (task._recompute is not None and task._recompute.inputs.held_bytes > 0))
        left.extend(name for name, each in model.named_parameters() if each.grad is not None)

    LinearShard.recurrence = noted
    engine.tasks.train.tune_linear_layers = watched if tunes else lambda *_: None
    task.model.register_forward_pre_hook(lambda *_: seen.append("step"))
    figures = task.run(lambda step: None)
    LinearShard.recurrence, engine.tasks.train.tune_linear_layers = recurrence, tune
    parameters = {name: whole_of(each).detach().numpy() for name, each in task.model.named_parameters()}
    measured = [figures.loss, figures.grad_norm, figures.sent_bytes]
    return {"seen": seen, "left": left, "measured": measured, "parameters": parameters}


def with_and_without(cases: dict[str, tuple[TrialSettings, int]]) -> dict[str, Any]:
    """By case: a run, and the same without the layer's."""
    return {name: [run_of(settings, tunes) for tunes in (True, False)] for name, (settings, _) in cases.items()}


@pytest.mark.parametrize("world_size", [1, 2, *slow(4)])
def test_one_linear_layer_runs_at_full_length_before_the_first_measured_step_and_leaves_nothing(
    world_size: int,
) -> None:
    cases = cases_of(world_size)
    for found in run_on_ranks(world_size, with_and_without, cases):
        for name, (settings, forwards) in cases.items():
            run, without = found[name]
            tokens = settings.seq_len // settings.cp_size
            warm_up = settings.gradient_accumulation * settings.steps.warmup  # forwards
            # The run's own events are those of the other, and the layer's before the first measured step.
            steps = [place for place, each in enumerate(without["seen"]) if each == "step"]
            layer = [tokens] * forwards + [-tokens] * (forwards > 0)
            assert run["seen"] == without["seen"][: steps[warm_up]] + layer + without["seen"][steps[warm_up] :], name
            assert run["measured"] == without["measured"], name
            assert run["left"] == [], name
            for key, values in without["parameters"].items():
                assert (run["parameters"][key] == values).all(), (name, key)
