"""Parallel sizes with which a run goes on on fewer ranks, and the command line that says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from engine.training.config import TrainingConfig
from harness.base.errors import UsageError
from harness.launch.torchrun import place_of
from harness.machine.this_machine import Machine
from harness.training.planning import settings_that_fit
from harness.training.progress import resuming
from harness.training.run import planned_order

MODEL = ModelShape(name="m", layers=1, hidden=16, ffn=32, heads=4, kv_heads=4, head_dim=8, vocab=256)
SETTINGS = TrialSettings(
    task="train", method="burst", model=MODEL, seq_len=96, cp_size=4, dtype="fp32", checkpoint=Checkpoint(every=1)
)


def config(**changes: object) -> TrainingConfig:
    return TrainingConfig(settings=replace(SETTINGS, **changes), steps=10)


def hosts(nodes: int, ranks: int) -> Machine:
    return Machine(hostname="h", device="cpu", cores=2, memory_gib=8.0, nodes=nodes, ranks_per_node=ranks)


@pytest.mark.parametrize(
    ("changes", "machine", "expected"),
    [
        ({}, hosts(2, 2), {}),
        ({}, hosts(1, 2), {"world_size": 2, "cp_size": 2}),
        ({}, hosts(1, 3), {"world_size": 2, "cp_size": 2}),  # 3 does not divide the 4 context-parallel ranks
        ({"cp_size": 2, "world_size": 8}, hosts(1, 4), {"world_size": 4, "gradient_accumulation": 2}),
        # 3 replicas cannot share 4 micro-batches, so 6 ranks are not all used.
        ({"cp_size": 2, "world_size": 8}, hosts(3, 2), {"world_size": 4, "gradient_accumulation": 2}),
        ({"cp_size": 2, "world_size": 4, "gradient_accumulation": 3}, hosts(3, 1), {"world_size": 3, "cp_size": 1,
                                                                                  "gradient_accumulation": 2}),
        ({"tp_size": 2, "cp_size": 1, "world_size": 2}, hosts(1, 1), None),
    ],
)  # fmt: skip
def test_a_run_goes_on_with_as_many_ranks_as_keep_the_sequences_of_a_step(changes, machine, expected) -> None:
    run = config(**changes)
    found = settings_that_fit(run, machine)
    assert found == expected
    if found is not None:
        goes_on = replace(run, settings=replace(run.settings, **found))
        assert goes_on.sequences_per_step == run.sequences_per_step


def test_ranks_that_do_not_spread_over_the_hosts_are_refused_with_the_sizes_that_do(tmp_path) -> None:
    with pytest.raises(UsageError) as refused:
        planned_order(config(world_size=4), hosts(3, 1), tmp_path, resume=True)
    sentence = str(refused.value)
    assert sentence.startswith("this run cannot start: 4 ranks do not spread evenly over the 3 nodes with 1 each")
    assert sentence.endswith("; here it goes on with --set world_size=2 --set cp_size=2")
    with pytest.raises(UsageError) as new:  # whose sizes are the user's to choose
        planned_order(config(world_size=4), hosts(3, 1), tmp_path, resume=False)
    assert "here it goes on" not in str(new.value)


def test_the_next_command_has_each_setting_once() -> None:
    typed = ["burst", "train", "c.yaml", "--set", "cp_size=4", "--set=world_size=4", "--set", "steps=5", "--resume"]
    assert resuming(typed, {"cp_size": 2, "world_size": 2}) == [
        *("burst", "train", "c.yaml", "--set", "steps=5", "--resume"),
        *("--set", "cp_size=2", "--set", "world_size=2"),
    ]


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
TORCHRUN["MASTER_ADDR"] = "lab1"


def test_a_rank_knows_its_host_from_torchruns_variables() -> None:
    place = place_of(TORCHRUN)
    assert (place.node, place.nodes, place.leads, place.master, place.port) == (1, 2, False, "lab1", 29500)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": ""}, "RANK is not set, as torchrun sets it for the ranks it starts; start torchrun --nnodes 2"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE is 'four', expected a number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is 99999, expected 1 to 65535"),
        ({"LOCAL_WORLD_SIZE": "3"}, "3 of 4 ranks are on this host, which is not the same number on every host"),
    ],
)
def test_other_variables_are_refused_in_one_sentence(changes, words) -> None:
    with pytest.raises(UsageError) as error:
        place_of(TORCHRUN | changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
