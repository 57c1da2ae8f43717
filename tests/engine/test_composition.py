"""Loss, norm, every gradient and every updated parameter equal a one-process dense run, whatever is combined."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.problem import RUNS_OF_TOKENS
from engine.combinations import checkpoint_unsupported_reason
from engine.lora import Lora
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from harness.spec.methods import all_methods, method_named
from tests.engine.parity import Result, apart, dense_parameters, dense_run, errors, parallel_runs
from tests.pairwise import Row, pairs_of, pairwise
from tests.ranks import run_on_ranks
from tests.slow import slow

# Odd sizes on purpose: hidden size, MLP and vocabulary do not divide by 4, so that FSDP2's last ranks hold short shards
# or none. Four layers are a group of three and one of one.
SHAPE = ModelShape(name="odd", layers=4, hidden=18, ffn=30, heads=8, kv_heads=4, head_dim=4, vocab=257)
# Two sequences per replica and step, in one micro-batch or two.
SETTINGS = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=48)
NATIVE = tuple(  # burst first; tensor parallelism shares no sequence
    name
    for name, method in all_methods().items()
    if hasattr(method, "attention")
    and not hasattr(method, "tensor_parallel")
    and "train" in getattr(method, "tasks", ("train",))
)
ALL_ADAPTED = Lora(rank=2, alpha=4.0, targets=("q", "k", "v", "output", "gate", "up", "down"))
CHOICES: dict[str, tuple[Any, ...]] = {
    "method": NATIVE,
    "layout": ("auto", "contiguous", "zigzag", "striped", "split_zigzag", "balanced"),
    "schedule": ("auto", "ring", "double_ring", "all_gather", "ulysses", "usp", "usp_transposed"),
    "backward": ("auto", "query", "key_value"),
    "mask": (
        "causal",
        "full",
        "sliding_window:9:2",
        "documents:7,17,5,...",
        "documents",
        "block_sparse:6:strided-3:causal",
    ),
    "every": (1, 0, 3),
    "tail": (1.0, 0.0, 0.35),
    "offload": ("none", "inputs", "all"),
    "replay": ("hold", "bisect"),
    "whole_layers": (0, 1, 3),
    "host_layers": (0, 2),
    "mlp": (1.0, 0.0, 0.4),
    "projection_tiles": (1, 3),
    "mlp_tiles": (1, 3),
    "head_groups": (1, 3),
    "head_tiles": (0, 3),
    "optimizer_offload": (False, True, 0.4),
    "sharding": ("full", "hybrid"),
    "gradient_accumulation": (1, 2),
    "lm_head_fusion": (True, False),
    "z_loss": (0.0, 0.01),
    "lora": (None, Lora(rank=3, alpha=5.0, targets=("q", "v", "output", "gate", "down")), ALL_ADAPTED),
    "dtype": ("fp64", "fp32", "bf16"),
}
ARRANGING = ("layout", "schedule", "backward")  # how the ranks share a sequence
# What two replicas do together.
REPLICATED = ("optimizer_offload", "sharding", "gradient_accumulation", "lm_head_fusion", "z_loss", "lora", "dtype")
WORLDS = [(1, 1), (2, 2), (4, 2), (4, 4)]  # ranks, of which so many share a sequence; two nodes from two ranks on
REPEATED = ((2, 2), (4, 4))  # whose choices the others have among theirs
STEPS = 2  # of the optimizer, in fp64: in narrower types AdamW's first steps turn rounding into whole updates
LIMITS = {"fp64": 1e-10, "fp32": 1e-5}


CHECKPOINT = ("every", "tail", "offload", "replay", "whole_layers", "host_layers", "mlp")


def settings_of(row: Row, world_size: int = 1, cp_size: int = 1) -> TrialSettings:
    row = dict(row)
    checkpoint = Checkpoint(**{name: row.pop(name) for name in CHECKPOINT})
    sizes = {"world_size": world_size, "cp_size": cp_size, "emulate_nodes": min(2, world_size)}
    return dataclasses.replace(
        SETTINGS, checkpoint=checkpoint, batch_size=2 // row["gradient_accumulation"], **sizes, **row
    )


def allowed(row: Row) -> bool:
    """Logits formed at once have no tiles, adapters no groups of heads, and layers in host memory are some of those
    that are kept whole. Burst refuses two combinations: tokens that
    are not consecutive cannot be exchanged for heads or gathered, and all_gather has no query side. Other methods say
    which ones they refuse."""
    if (row["head_tiles"] and not row["lm_head_fusion"]) or (row["head_groups"] > 1 and row["lora"] is not None):
        return False
    if checkpoint_unsupported_reason(settings_of(row)):
        return False
    if row["method"] == "burst":
        queries_gathered = row["schedule"] == "all_gather" and row["backward"] == "query"
        return not queries_gathered and not (row["layout"] == "striped" and row["schedule"] in RUNS_OF_TOKENS)
    return method_named(row["method"]).refuse(settings_of(row, 4, 4)) is None


def choices_for(world_size: int, cp_size: int) -> dict[str, tuple[Any, ...]]:
    """All of them where four ranks share one sequence; on two, those that differ there; elsewhere how ranks share it is
    left alone."""
    if world_size != cp_size or cp_size == 1:
        left = ("method", *ARRANGING, *(("head_groups",) if cp_size > 1 else ()))
        return {name: values[:1] if name in left else values for name, values in CHOICES.items()}
    choices = CHOICES | {"head_groups": (1,)}  # of sequences that no ranks share
    return choices if cp_size > 2 else choices | {"schedule": ("auto", "ring", "ulysses")}


@cache
def rows_for(world_size: int, cp_size: int) -> list[Row]:
    """Other rows for every arrangement of ranks, so that together they hold many triples as well."""
    return pairwise(choices_for(world_size, cp_size), allowed, seed=10 * world_size + cp_size)


def with_every_value(rows: list[Row], choices: dict[str, tuple[Any, ...]], names: Collection[str]) -> list[Row]:
    """As many of the first rows as hold every value of these names between them: few, as the first bring most that is
    new."""
    missing = {(name, value) for name in names for value in choices[name]}
    for count, row in enumerate(rows, start=1):
        missing -= row.items()
        if not missing:
            return rows[:count]
    raise AssertionError(f"no row holds {missing}")


def plain(settings: TrialSettings) -> TrialSettings:
    """The same loss of the same sequences on one rank, with no lever and nothing that is parallel."""
    sequences = settings.batch_size * settings.gradient_accumulation * settings.dp_size
    said = {name: getattr(settings, name) for name in ("mask", "z_loss", "lora", "dtype")}
    return dataclasses.replace(
        SETTINGS, batch_size=sequences, checkpoint=Checkpoint(every=0), lm_head_fusion=False, **said
    )


@pytest.mark.parametrize(("world_size", "cp_size"), [(1, 1), *slow((2, 2)), (4, 2), (4, 4)])
def test_every_two_settings_are_combined(world_size: int, cp_size: int) -> None:
    choices, rows = choices_for(world_size, cp_size), rows_for(world_size, cp_size)
    found = set().union(*(pairs_of(row, list(choices)) for row in rows))
    for pair in itertools.combinations(((name, value) for name in choices for value in choices[name]), 2):
        (one, first), (other, second) = pair
        if one != other and allowed(
            {name: values[0] for name, values in choices.items()} | {one: first, other: second}
        ):
            assert pair in found
    assert all(map(allowed, rows))


def runs(cases: dict[str, TrialSettings], steps: int) -> dict[str, Result]:
    wide = {name: settings for name, settings in cases.items() if settings.dtype == "fp64"}
    narrow = {name: settings for name, settings in cases.items() if name not in wide}
    return parallel_runs(wide, steps) | parallel_runs(narrow)


@pytest.mark.parametrize(
    ("world_size", "cp_size", "every"),
    [
        *((*world, "value") for world in WORLDS if world not in REPEATED),
        *slow(*((*world, "value") for world in REPEATED), *((*world, "pair") for world in WORLDS)),
    ],
)
def test_every_combination_gives_the_step_of_a_dense_run(world_size: int, cp_size: int, every: str) -> None:
    rows, steps = rows_for(world_size, cp_size), STEPS
    if every == "value":
        names = {(4, 2): REPLICATED, (4, 4): ("mask", *ARRANGING)}.get((world_size, cp_size), CHOICES)
        rows = with_every_value(rows, choices_for(world_size, cp_size), names)
        steps = 1 if cp_size == 4 else STEPS  # ranks share a sequence in the same way in a second one
    cases = {str(row): settings_of(row, world_size, cp_size) for row in rows}
    per_rank = run_on_ranks(world_size, runs, cases, steps)
    alone = {plain(settings) for settings in cases.values() if settings.dtype == "bf16"}
    in_bf16 = run_on_ranks(1, parallel_runs, {each: each for each in alone})[0]
    wrong = {
        name: problems
        for name, settings in cases.items()
        if (problems := _problems(per_rank[0][name], plain(settings), in_bf16, steps))
    }
    assert wrong == {}
    for ranks in zip(*(rank.values() for rank in per_rank), strict=True):
        assert len({(rank["loss"], rank["grad_norm"]) for rank in ranks}) == 1


@cache
def _truth(plainly: TrialSettings, steps: int) -> Result:
    return dense_run(plainly, torch.float64) | {"parameters": dense_parameters(plainly, steps)}


def _problems(
    found: Result, plainly: TrialSettings, in_bf16: dict[TrialSettings, Result], steps: int
) -> dict[str, float]:
    """What of one step errs by more than its dtype allows, and by how much."""
    truth = _truth(dataclasses.replace(plainly, dtype="fp64"), steps)
    off = errors(found, truth)
    if plainly.dtype != "bf16":
        if plainly.dtype == "fp64":
            off |= {f"updated {name}": apart(found["parameters"][name], p) for name, p in truth["parameters"].items()}
        return {name: error for name, error in off.items() if not error < LIMITS[plainly.dtype]}
    own = errors(in_bf16[plainly], truth)
    assert max(own.values()) < 0.1
    # All together, since which of some dozens errs most is chance in bf16; none by itself stands out either.
    beside_own = {"all": _overall(off) / _overall(own), "the worst": max(off.values()) / max(own.values())}
    return {name: ratio for name, ratio in beside_own.items() if not ratio < {"all": 1.25, "the worst": 2}[name]}


def _overall(found: dict[str, float]) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(list(found.values())))))
