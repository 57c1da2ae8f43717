"""A run that is resumed adds rows to others only where both are of one experiment, commit, GPU and driver."""

import csv
import shutil
from dataclasses import replace

import pytest

from harness.base.errors import UsageError
from harness.machine.this_machine import Machine
from harness.records.record import write_record
from harness.records.stored import read_records
from harness.run.execution import Resume
from tests.harness.run.test_run_experiment import HERE, Runner, trial


@pytest.fixture
def run(tmp_path):
    return Runner(tmp_path / "run")


def gpus(name: str = "NVIDIA H200", driver: str = "580.65.06") -> Machine:
    return Machine(
        hostname="gpu01", device="cuda", cores=8, memory_gib=64.0, gpu_name=name, gpu_count=1, driver=driver
    )  # fmt: skip


def with_driver(run: Runner, driver: str) -> None:
    for record in read_records(run.run_dir):
        record.measurement.software["driver"] = driver
        write_record(run.run_dir / "trials" / record.trial_id, record)


def test_another_experiments_records_are_kept_apart_until_mixing_is_asked_for(run):
    run({}, [trial(32)], experiment="first")
    other = replace(trial(64), experiment="second")
    with pytest.raises(UsageError, match=r"holds 1 record of experiment exp, not second; give --out another directory"):
        run({}, [other], Resume(), experiment="second")
    assert run.records().keys() == {32}
    code, launcher = run({}, [other], Resume(mix=True), experiment="second")
    assert (code, len(launcher.jobs)) == (0, 1)
    assert run.said[-1] == f"mixed as asked: {run.run_dir} holds 1 record of experiment exp, not second"
    with open(run.run_dir / "results.csv", newline="") as file:
        assert sorted(row["experiment"] for row in csv.DictReader(file)) == ["exp", "second"]


def test_trials_that_an_edited_experiment_has_no_longer_are_named_and_added_ones_run(run):
    run({}, [trial(32), trial(64)])
    told = "2 records of trials that this experiment does not have, with seq_len 32 or 64, not 128; give --out"
    with pytest.raises(UsageError, match=told):
        run({}, [trial(128)], Resume())
    code, launcher = run({}, [trial(32), trial(64), trial(128)], Resume())
    assert (code, [job.trial_id for job in launcher.jobs]) == (0, [trial(128).id])


def test_another_commit_is_named_where_something_would_be_added(run):
    trials = [trial(32), trial(64)]
    run({}, trials[:1])
    with pytest.raises(UsageError, match="1 record at commit abc, not def"):
        run({}, trials, Resume(), commit="def")
    with pytest.raises(UsageError, match="1 record at commit abc, not def"):  # a round more is added too
        run({}, trials[:1], Resume(), commit="def", rounds=2)
    assert run({}, trials[:1], Resume(), commit="def")[0] == 0  # nothing is added
    assert run({}, trials, Resume(), commit="")[0] == 0  # unknown


def test_other_changes_of_the_same_commit_are_named_also_after_a_run_that_added_nothing(run):
    trials = [trial(32), trial(64)]
    run({}, trials[:1], commit="abc-dirty", changes="one")
    assert run({}, trials[:1], Resume(), commit="abc-dirty", changes="two")[0] == 0  # nothing is added
    with pytest.raises(UsageError, match="1 record at commit abc-dirty, whose changes were others"):
        run({}, trials, Resume(), commit="abc-dirty", changes="two")
    assert run({}, trials, Resume(), commit="abc-dirty", changes="one")[0] == 0
    assert run({}, [*trials, trial(128)], Resume(mix=True), commit="abc-dirty", changes="two")[0] == 0
    with pytest.raises(UsageError, match="3 records at commit abc-dirty, whose changes were others"):
        run({}, [*trials, trial(128), trial(256)], Resume(), commit="abc-dirty", changes="one")


def test_a_record_that_is_executed_again_is_not_mixed_with_anything(run):
    run({32: "ctrl-c"}, [trial(32)])
    assert run({}, [trial(32)], Resume(), commit="def")[0] == 0


def test_another_gpu_and_another_driver_are_named(run):
    trials = [trial(32), trial(64)]
    run({}, trials[:1], machine=gpus())
    with_driver(run, "580.65.06")
    with pytest.raises(UsageError, match="1 record on NVIDIA H200, not cpu"):
        run({}, trials, Resume(), machine=HERE)
    with pytest.raises(UsageError, match=r"1 record with driver 580\.65\.06, not 590\.1"):
        run({}, trials, Resume(), machine=gpus(driver="590.1"))
    assert run({}, trials, Resume(), machine=gpus())[0] == 0


def test_a_trial_that_only_the_plan_refused_mixes_nothing(run):
    run({}, [trial(32, "too long"), trial(64)])
    run({}, [trial(32, "too long"), trial(64)], Resume(), commit="abc")
    records = {length: record.status for length, record in run.records().items()}
    assert records == {32: "refused", 64: "ok"}


def test_other_environment_variables_than_those_of_the_records_that_stay_are_said(run):
    """A ratio of two such trials is one of the variables too."""
    trials, said = [trial(32), trial(64)], "measured with other values of {} than this run has; set them as before"
    run({}, trials[:1], environment={"OMP_NUM_THREADS": "2", "TORCH_TOKEN": "secret"})
    for environment, names in (
        ({"OMP_NUM_THREADS": "2", "TORCH_TOKEN": "other"}, None),  # what no record shows is not compared
        ({"OMP_NUM_THREADS": "1", "TORCH_TOKEN": "secret", "NCCL_ALGO": "Ring"}, "NCCL_ALGO, OMP_NUM_THREADS"),
    ):
        run.said.clear()
        run({}, trials, Resume(again=frozenset([trials[1].id])), environment=environment)
        assert [said.format(names) in one for one in run.said] == ([True] if names else [])
    run.said.clear()
    run({}, trials, Resume(), environment={})  # adds nothing
    assert run.said == []


def test_a_copy_of_a_trials_directory_is_said_before_trials_are_added(run):
    """Its row would stand twice in results.csv and in every table."""
    run({}, [trial(32)])
    place = run.run_dir / "trials" / trial(32).id
    shutil.copytree(place, place.with_name("zcopy"))
    run({}, [trial(32), trial(64)], Resume())
    stands = f"stands twice, in {place}/record.json and {place.with_name('zcopy')}/record.json; leave one of them out"
    assert run.said == [f"{trial(32).id} {stands}"]
