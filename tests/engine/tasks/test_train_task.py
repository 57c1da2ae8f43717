"""The training task's own rules: sharding of initial values, refusals, losses that stop being numbers."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import engine.memory.offload
from engine.burst import METHOD
from engine.data.store import build_store
from engine.data.tokenizers import ByteTokenizer
from engine.distributed import arrange
from engine.settings import Checkpoint, Steps, TrialSettings
from engine.shape import ModelShape
from engine.tasks.train import TrainTask
from tests.engine.parity import task_of
from tests.ranks import run_on_ranks
from tests.slow import slow

# 5 rows of a norm over 4 ranks leave the last rank with none.
SHAPE = ModelShape(name="odd", layers=1, hidden=5, ffn=7, heads=1, kv_heads=1, head_dim=4, vocab=259)
DEEPER = dataclasses.replace(SHAPE, layers=3, hidden=6, heads=4, kv_heads=2, ffn=8, vocab=260)
SETTINGS = TrialSettings(
    task="train", method="burst", model=SHAPE, seq_len=32, cp_size=1, dtype="fp32", steps=Steps(warmup=0, measured=2)
)


def outcome(settings: TrialSettings) -> str:
    """The sentence a set-up or a run ends with."""
    try:
        TrainTask(settings, METHOD, arrange(settings, torch.device("cpu"))).run(lambda step: None)
    except (ValueError, FloatingPointError) as error:
        return f"{type(error).__name__}: {error}"
    return "ran"


def outcomes(cases: list[TrialSettings]) -> list[str]:
    return [outcome(settings) for settings in cases]


def test_impossible_and_diverging_trials_end_in_one_sentence(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.vocabulary = 300
    build_store(["python_docs"], tmp_path / "store", tokenizer)
    cases = [
        SETTINGS,
        dataclasses.replace(SETTINGS, data=str(tmp_path / "store")),
        dataclasses.replace(SETTINGS, model=dataclasses.replace(SHAPE, vocab=100)),
        dataclasses.replace(SETTINGS, data="/no/such/text"),
        dataclasses.replace(SETTINGS, learning_rate=1e38),
        dataclasses.replace(SETTINGS, linear_dtype="float8"),
    ]
    (ran, large, small, missing, diverged, fp32) = run_on_ranks(1, outcomes, cases)[0]
    assert fp32.startswith("ValueError: linear_dtype float8")
    assert ran == "ran"
    assert large == (
        f"ValueError: model odd has a vocabulary of 259, but the tokens of {tmp_path}/store need 300; "
        "choose a model with at least that many"
    )
    assert small.startswith("ValueError: model odd has a vocabulary of 100, but the tokens of python_docs need 256")
    assert missing.startswith("ValueError: data '/no/such/text' is no file and no token store")
    assert diverged.startswith("FloatingPointError: step 2 has loss nan")
    assert diverged.endswith("try a learning_rate below 1e+38")


def steps_on(cases: list[TrialSettings]) -> list[tuple[list[int], int, dict[str, str]]]:
    """By case: tokens that each step's model was given here, and what was measured and chosen."""
    found = []
    for settings in cases:
        _, task = task_of(settings)
        seen: list[int] = []
        task.model.register_forward_pre_hook(lambda _, arguments, seen=seen: seen.append(arguments[0].shape[1]))
        measurement = task.run(lambda step: None)
        assert len(measurement.loss) == settings.steps.warmup + settings.steps.measured
        found.append((seen, len(measurement.step_seconds), measurement.chosen))
    return found


def test_warm_up_may_take_shorter_sequences_and_the_nodes_that_hybrid_sharding_found_are_recorded() -> None:
    two = dataclasses.replace(SETTINGS, world_size=2)
    short = dataclasses.replace(two, cp_size=2, steps=Steps(warmup=2, measured=1, warmup_seq_len=16))
    hybrid = [dataclasses.replace(two, sharding="hybrid", emulate_nodes=nodes) for nodes in (1, 2)]
    for (seen, measured, chosen), *found in run_on_ranks(2, steps_on, [short, *hybrid]):
        assert (seen, measured, chosen["schedule"]) == ([8, 8, 16], 1, "ring")
        assert [chosen["sharding_node_size"] for _, _, chosen in found] == ["2", "1"]


def locked(cases: list[TrialSettings]) -> list[tuple[list[int], list[int]]]:
    """By case: sizes of host buffers that were locked between the warm-up and the measured step, and during this
    step."""
    found, lock = [], engine.memory.offload.host_buffer
    for settings in cases:
        _, task = task_of(settings)
        sizes: list[int] = []
        begun = [0]  # how many had been locked when each step's model was called, and when its backward had ended
        engine.memory.offload.host_buffer = lambda nbytes, device, sizes=sizes: (
            sizes.append(nbytes),
            lock(nbytes, device),
        )[1]
        task.model.register_forward_pre_hook(lambda *_, begun=begun, sizes=sizes: begun.append(len(sizes)))
        task.run(lambda step, begun=begun, sizes=sizes: begun.append(len(sizes)))
        *_, warmed_up, measured, _ = begun
        found.append((sorted(sizes[warmed_up:measured]), sorted(sizes[measured:])))
    return found


def begun_after(settings: TrialSettings, folder: str) -> list[bool]:
    """Whether every rank had locked its memory when this one began its measured step; rank 0 does so last."""
    _, task = task_of(settings)
    assert task._recompute is not None
    reserve, begun = task._recompute.reserve, []

    def late(*sizes: Any) -> None:
        while torch.distributed.get_rank() == 0 and len(list(Path(folder).iterdir())) + 1 < settings.world_size:
            time.sleep(0.01)
        time.sleep(0.2 if torch.distributed.get_rank() == 0 else 0)  # time for the others to go on, if they do
        reserve(*sizes)
        Path(folder, str(torch.distributed.get_rank())).touch()

    task._recompute.reserve = late
    start = task._clock.start
    task._clock.start = lambda: (begun.append(len(list(Path(folder).iterdir())) == settings.world_size), start())[1]
    task.run(lambda step: None)
    return begun


def test_no_rank_begins_the_measured_step_before_all_have_locked_their_memory(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    checkpoint, steps = Checkpoint(every=1, tail=0, offload="inputs"), Steps(warmup=1, measured=1, warmup_seq_len=16)
    settings = dataclasses.replace(SETTINGS, cp_size=2, world_size=2, checkpoint=checkpoint, steps=steps)
    assert run_on_ranks(2, begun_after, settings, str(folder)) == [[False, True]] * 2


@pytest.mark.parametrize(
    ("method", "checkpoint"),
    [
        ("burst", Checkpoint(every=2, tail=0.3, offload="all", replay="bisect")),
        ("megatron_tp", Checkpoint(every=1, tail=0.6, offload="all")),
        *slow(
            ("burst", Checkpoint(every=1, tail=0, offload="inputs")),
            ("burst", Checkpoint(every=1, tail=1, offload="all")),
            ("burst", Checkpoint(every=2, tail=0.5, offload="all", replay="hold", whole_layers=1)),
        ),
    ],
)
def test_a_measured_step_after_a_shorter_warm_up_locks_no_host_memory(method: str, checkpoint: Checkpoint) -> None:
    divided = {"tp_size": 2} if method == "megatron_tp" else {"cp_size": 2}
    changes = {"method": method, "model": DEEPER, "world_size": 2, "checkpoint": checkpoint, **divided}
    whole = dataclasses.replace(SETTINGS, **changes, steps=Steps(warmup=0, measured=1))
    shorter = dataclasses.replace(whole, steps=Steps(warmup=1, measured=1, warmup_seq_len=16))
    for (_, by_itself), warmed_up in run_on_ranks(2, locked, [whole, shorter]):
        assert by_itself
        assert warmed_up == (by_itself, [])


def test_a_warm_up_length_that_does_not_split_is_refused() -> None:
    steps = Steps(warmup=1, measured=1, warmup_seq_len=18)
    settings = dataclasses.replace(SETTINGS, cp_size=2, world_size=2, steps=steps)
    for found in run_on_ranks(2, outcome, settings):
        assert "seq_len 18 does not split" in found
