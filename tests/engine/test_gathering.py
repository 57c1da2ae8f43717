"""Whose parameters are gathered in a step, and in which order."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from tests.engine.parity import task_of
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="odd", layers=4, hidden=16, ffn=32, heads=4, kv_heads=2, head_dim=4, vocab=257)


def gathered(every: int) -> list[list[str]]:
    """Units gathered by a step's forward and by its backward; a unit goes by the name of its module."""
    settings = TrialSettings(
        task="train", method="burst", model=SHAPE, seq_len=32, world_size=2, cp_size=2, dtype="fp32",
        checkpoint=Checkpoint(every=every, tail=0.5),
    )  # fmt: skip
    _, task = task_of(settings)
    names: list[str] = []
    gather = _fsdp_param_group.foreach_all_gather

    def noting(params, *args, **kwargs):
        names.append(".".join(params[0]._param_fqn.split(".")[: 2 if "blocks" in params[0]._param_fqn else 1]))
        return gather(params, *args, **kwargs)

    _fsdp_param_group.foreach_all_gather = noting
    [batch] = task.batches(0)
    loss = task.forward(batch)
    forward = names.copy()
    loss.backward()
    return [forward, names[len(forward) :]]


BLOCKS = [f"blocks.{index}" for index in range(SHAPE.layers)]


@pytest.mark.parametrize(
    ("every", "backward"),
    [
        (0, BLOCKS[::-1]),
        (1, BLOCKS[::-1]),
        # Of a pair the second is gathered for its own backward and the first beside it, which computes the second's
        # input again and is kept for its own.
        (2, BLOCKS[::-1]),
        # The first ones compute the last one's input again and are let go, but for the one that is next.
        (4, [BLOCKS[3], BLOCKS[2], BLOCKS[0], BLOCKS[1], BLOCKS[1], BLOCKS[0]]),
    ],
)
def test_backward_gathers_each_layer_when_it_is_needed_and_no_embedding(every, backward) -> None:
    for forward, found in run_on_ranks(2, gathered, every):
        assert forward == ["norm", "embedding", *BLOCKS, "head"]
        assert found == backward


def gathered_before_each_layer() -> list[set[str]]:
    """The units whose gathering a forward has asked for when each layer begins to compute."""
    settings = TrialSettings(
        task="train", method="burst", model=SHAPE, seq_len=32, world_size=2, cp_size=2, dtype="fp32",
        checkpoint=Checkpoint(every=0),
    )  # fmt: skip
    _, task = task_of(settings)
    asked: set[str] = set()
    gather = _fsdp_param_group.foreach_all_gather

    def noting(params, *args, **kwargs):
        asked.add(".".join(params[0]._param_fqn.split(".")[: 2 if "blocks" in params[0]._param_fqn else 1]))
        return gather(params, *args, **kwargs)

    _fsdp_param_group.foreach_all_gather = noting
    found: list[set[str]] = []

    def beginning(activations):
        def begin(*args):
            found.append(asked.copy())
            return activations(*args)

        return begin

    for block in task.model.blocks:
        block.activations = beginning(block.activations)
    [batch] = task.batches(0)
    task.forward(batch)
    return found


def test_one_layer_is_gathered_ahead() -> None:
    units = [*BLOCKS, "head"]
    for found in run_on_ranks(2, gathered_before_each_layer):
        assert [{*units} & asked for asked in found] == [{*units[: place + 2]} for place in range(SHAPE.layers)]
