"""A run that was stopped goes on as if nothing had happened, on these ranks or on others."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from engine.data.sequences import VALIDATION
from engine.data.sources import PYTHON_DOCS
from engine.data.store import build_store
from engine.data.tokenizers import ByteTokenizer
from engine.settings import Checkpoint
from engine.training.config import Evaluation
from engine.training.state import whole_parameters
from tests.engine.training.training_runs import SHAPE, config, curve, order, several
from tests.ranks import run_on_ranks

ALLOWED = "what only changes its course"
PER_STEP = "sequences per step (batch_size x gradient_accumulation x replicas)"
CHANGES = {
    "seq_len 32, and the run now has 16": config(seq_len=16),
    f"{PER_STEP} 2, and the run now has 4": config(batch_size=4),
    "seed 0, and the run now has 1": config(seed=1),
    "model.layers 2, and the run now has 1": config(model=replace(SHAPE, layers=1)),
    ALLOWED: config(steps=5, learning_rate=0.002, evaluate=Evaluation()),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> list[dict]:
    """Two context-parallel ranks: six steps at once, then three and, resumed, three more."""
    whole, parts = str(folder / "whole"), str(folder / "parts")
    six = config(cp_size=2)
    starts = [(whole, order(six), None), (parts, order(six), 3), (parts, order(six, resume=True), None)]
    return run_on_ranks(2, several, starts)[0]


@pytest.fixture(scope="module")
def one_rank(folder: Path, two_ranks: list[dict]) -> dict[str, dict]:
    """What one rank makes of copies of the two-rank run: as it was after step 4, changed, and damaged."""
    starts = {"alone": (copy(folder, "alone", steps=[4]), config())}
    micro_batches = config(batch_size=1, gradient_accumulation=2)
    starts["in micro-batches"] = (copy(folder, "micro", steps=[4]), micro_batches)
    changed = copy(folder, "changed", steps=[4])
    starts |= {words: (changed, case) for words, case in CHANGES.items()}
    (folder / "other.txt").write_text("other words, " * 2500)
    starts["other data"] = (changed, config(data=str(folder / "other.txt")))
    build_store([PYTHON_DOCS], folder / "store", ByteTokenizer(), VALIDATION)
    starts["a store of the text"] = (copy(folder, "saved", steps=[4]), config(data=str(folder / "store")))
    build_store([PYTHON_DOCS], folder / "tenth", ByteTokenizer(), 0.1)
    starts["a store with more held out"] = (changed, config(data=str(folder / "tenth")))
    build_store([PYTHON_DOCS], folder / "unparted", ByteTokenizer())
    starts["a store with nothing held out"] = (changed, config(data=str(folder / "unparted"), evaluate=Evaluation()))
    starts["a store with nothing to evaluate on"] = (changed, config(data=str(folder / "unparted")))
    starts["fewer steps"] = (changed, config(steps=3))
    starts["newest damaged"] = (copy(folder, "newest", steps=[4, 6]), config())
    damage(folder / "newest", 6)
    starts["newest half written"] = (copy(folder, "half", steps=[4, 6]), config())
    (folder / "half" / "checkpoints" / "step-00000006" / "checkpoint.json").unlink()
    starts["all damaged"] = (copy(folder, "all", steps=[4, 6]), config())
    damage(folder / "all", 6)
    damage(folder / "all", 4)
    starts["finished"] = (copy(folder, "finished", steps=[4, 6]), config())
    results = run_on_ranks(
        1,
        several,
        [(run, order(case, resume=True), None) for run, case in starts.values()],
    )[0]
    return dict(zip(starts, results, strict=True))


def copy(folder: Path, name: str, steps: list[int]) -> str:
    """A copy of the two-rank run with the checkpoints of these steps."""
    shutil.copytree(folder / "parts", folder / name)
    for path in (folder / name / "checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) not in steps:
            shutil.rmtree(path)
    return str(folder / name)


def damage(run: Path, step: int) -> None:
    """Turn one bit in the middle of what rank 1 wrote."""
    path = run / "checkpoints" / f"step-{step:08d}" / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def assert_same_curve(found: dict, truth: dict, done: int) -> None:
    """Equal up to step `done`, and within fp32 rounding from there on."""
    assert curve(found)[:done] == curve(truth)[:done]
    for line, expected in zip(curve(found)[done:], curve(truth)[done:], strict=True):
        assert line[:2] == expected[:2]
        assert line[2:] == pytest.approx(expected[2:], rel=2e-5)
    assert curve(found, "evaluation")[-1][2] == pytest.approx(curve(truth, "evaluation")[-1][2], rel=2e-5)


def test_a_resumed_run_repeats_the_loss_curve_and_the_parameters_bit_for_bit(two_ranks) -> None:
    whole, first, second = two_ranks
    assert (whole["notes"], first["notes"]) == ([], [])
    [note] = second["notes"]
    assert re.fullmatch(r"going on after step 3, from /.*/checkpoints/step-00000003", note)
    assert (first["finished"], first["steps_done"]) == (False, 3)
    assert (second["finished"], second["steps_done"]) == (True, 6)
    assert [line[0] for line in curve(whole)] == [1, 2, 3, 4, 5, 6]
    assert curve(second) == curve(whole)
    assert curve(second, "evaluation") == curve(whole, "evaluation")
    assert second["parameters"] == whole["parameters"]


def test_one_process_reads_the_parameters_whole_and_refuses_what_has_changed(two_ranks, folder: Path) -> None:
    shape, parameters = whole_parameters(folder / "parts" / "checkpoints" / "step-00000006")
    assert shape == SHAPE
    assert {name: value.flatten().tolist() for name, value in parameters.items()} == two_ranks[0]["parameters"]
    run = Path(copy(folder, "unreadable", steps=[6]))
    damage(run, 6)
    with pytest.raises(ValueError, match="has changed since it was written"):
        whole_parameters(run / "checkpoints" / "step-00000006")


def test_evaluation_runs_before_the_first_step_when_due_and_at_the_end(two_ranks) -> None:
    first, *later, last = curve(two_ranks[0], "evaluation")
    assert [line[0] for line in (first, *later, last)] == [0, 3, 6]
    assert last[2] < first[2]


def test_the_newest_checkpoints_stay_and_the_pointer_names_the_last(two_ranks, folder: Path) -> None:
    directory = folder / "parts" / "checkpoints"
    assert sorted(path.name for path in directory.iterdir()) == ["latest", "step-00000004", "step-00000006"]
    assert (directory / "latest").read_text() == "step-00000006\n"


@pytest.mark.parametrize("how", ["alone", "in micro-batches"])
def test_a_run_resumes_with_one_rank(two_ranks, one_rank, how: str) -> None:
    assert_same_curve(one_rank[how], two_ranks[0], done=4)


def test_a_run_resumes_with_four_ranks_in_two_replicas_and_other_memory_settings(two_ranks, folder: Path) -> None:
    replicas = {"world_size": 4, "cp_size": 2, "batch_size": 1}
    levers = {"sharding": "hybrid", "emulate_nodes": 2, "optimizer_offload": True, "checkpoint": Checkpoint(tail=0.5)}
    cases = {"replicas": config(**replicas), "levers": config(**replicas, **levers)}
    starts = [(copy(folder, name, steps=[4]), order(case, resume=True), None) for name, case in cases.items()]
    for found in run_on_ranks(4, several, starts)[0]:
        assert_same_curve(found, two_ranks[0], done=4)


@pytest.mark.parametrize("words", [words for words in CHANGES if words != ALLOWED])
def test_settings_that_would_change_the_run_are_refused(one_rank, words: str) -> None:
    sentence = one_rank[words]["refused"]
    assert sentence.startswith("checkpoint step-00000004 cannot be resumed from: it was made with")
    assert words in sentence
    assert sentence.endswith("set that value again, or start anew without --resume")


def test_other_data_are_refused_and_another_schedule_is_not(one_rank) -> None:
    assert "it was made with data of sha256" in one_rank["other data"]["refused"]
    assert one_rank[ALLOWED]["steps_done"] == 5
    assert one_rank[ALLOWED]["metrics"][-1]["learning_rate"] < 0.002


def test_a_store_of_the_same_text_parted_alike_is_the_same_data(two_ranks, one_rank) -> None:
    assert_same_curve(one_rank["a store of the text"], two_ranks[0], done=4)


def test_a_store_with_another_part_held_out_is_refused_with_both_numbers(one_rank) -> None:
    sentence = one_rank["a store with more held out"]["refused"]
    assert re.search(r"it was made with validation tokens [1-9]\d+, and the run now has [1-9]\d+; ", sentence)
    assert "and the run now has none; " in one_rank["a store with nothing held out"]["refused"]
    assert "the 0 held-out tokens of" in one_rank["a store with nothing to evaluate on"]["refused"]


def test_a_run_cannot_end_before_where_it_is(one_rank) -> None:
    assert one_rank["fewer steps"] == {"refused": "steps is 3, but 5 steps of this run are done; give at least as many"}


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("newest damaged", "its file __1_0.distcp has changed since it was written"),
        ("newest half written", "its checkpoint.json cannot be read (No such file or directory)"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_skipped_with_a_sentence(two_ranks, one_rank, folder, case, problem):
    result = one_rank[case]
    skipped, going_on = result["notes"]
    assert skipped == f"checkpoint step-00000006 is skipped because {problem}; it is now broken-step-00000006"
    assert re.fullmatch(r"going on after step 4, from /.*/checkpoints/step-00000004", going_on)
    assert result["progress"][0]["note"] == result["notes"][0]
    assert_same_curve(result, two_ranks[0], done=4)


def test_without_any_whole_checkpoint_the_run_does_not_start_over_by_itself(one_rank) -> None:
    sentence = one_rank["all damaged"]["refused"]
    assert sentence.startswith("there is no checkpoint to resume from (checkpoint step-00000006 is skipped because")
    assert sentence.count("is skipped") == 2


def test_a_finished_run_stays_finished(two_ranks, one_rank) -> None:
    assert one_rank["finished"]["finished"]
    assert one_rank["finished"]["parameters"] == two_ranks[0]["parameters"]
    assert curve(one_rank["finished"]) == curve(two_ranks[0])
