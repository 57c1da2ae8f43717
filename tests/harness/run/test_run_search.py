"""Sequence lengths that a run need not try, and the search for the longest that trains, by what records say."""

import dataclasses

import pytest

from engine.settings import Checkpoint
from harness.base.errors import UsageError
from harness.records.record import read_record
from harness.run.bounds import Bounds
from harness.run.directory import RunDirectory
from harness.run.execution import Resume
from harness.run.search import next_length
from harness.spec.experiment import Search, load_experiment
from harness.spec.trial import Trial
from harness.spec.written import experiment_text
from tests.harness.run.test_run_experiment import HERE, Runner, ScriptedLauncher
from tests.harness.run.test_run_experiment import trial as trial_of

UNTIL_OOM = Search(until="oom")
BY_16 = Search(until="oom", bisect=16)


@pytest.fixture
def run(tmp_path, monkeypatch):
    return Runner(tmp_path / "run")


def trial(seq_len: int) -> Trial:
    """A trial of a model that can read text, so that the plan does not refuse further lengths."""
    settings = trial_of(seq_len).settings
    return dataclasses.replace(
        trial_of(seq_len), settings=dataclasses.replace(settings, model=dataclasses.replace(settings.model, vocab=256))
    )


def fits(limit: int, lengths=range(1, 20_000)) -> dict[int, str]:
    """Outcomes by length of a method that trains at most `limit` tokens."""
    return {length: "ok" if length <= limit else "oom" for length in lengths}


def lengths(launcher: ScriptedLauncher) -> list[int]:
    return [int(job.trial_id.split("-s")[1].split("-")[0]) for job in launcher.jobs]


def test_lengths_ascend_until_memory_runs_out_and_longer_ones_say_why_they_did_not_run(run):
    run.shuffle = lambda trials: trials.reverse()
    trials = [trial(length) for length in (512, 64, 256, 128)]
    code, launcher = run(fits(100), trials, search=UNTIL_OOM)
    assert (code, lengths(launcher)) == (0, [64, 128])
    records = run.records()
    assert {length: records[length].status for length in records} == {
        64: "ok", 128: "oom", 256: "refused", 512: "refused"
    }  # fmt: skip
    assert records[512].reason == "not run because 128 tokens ended as oom (search.until: oom)"


def test_each_combination_of_the_other_settings_is_searched_on_its_own(run):
    other = [
        dataclasses.replace(each, settings=dataclasses.replace(each.settings, method="ulysses", seq_len=length))
        for length in (65, 129)
        for each in [trial(length)]
    ]
    _, launcher = run({64: "oom", 65: "ok", 129: "ok"}, [trial(64), trial(128), *other], search=UNTIL_OOM)
    assert lengths(launcher) == [64, 65, 129]


def planned_trial(seq_len: int, tail: float) -> Trial:
    """A trial whose `checkpoint.tail` the planner chose, for another machine."""
    one = trial(seq_len)
    checkpoint = Checkpoint(plan="auto", tail=tail)
    return dataclasses.replace(
        one, settings=dataclasses.replace(one.settings, checkpoint=checkpoint, planned="checkpoint.tail")
    )


def test_lengths_for_which_the_planner_chose_other_values_are_searched_together(run):
    trials = [planned_trial(64, 1.0), planned_trial(128, 0.5), planned_trial(256, 0.0)]
    _, launcher = run(fits(100), trials, search=BY_16)
    assert lengths(launcher) == [64, 128, 96, 112]
    records = run.records()
    assert records[256].reason == "not run because 128 tokens ended as oom (search.until: oom)"
    assert {length for length, record in records.items() if record.plan is not None} >= {96, 112}


def test_a_combination_that_the_plan_refuses_whole_is_not_searched(run):
    refused = [
        dataclasses.replace(
            each, settings=dataclasses.replace(each.settings, method="ulysses"), unsupported_reason="too few heads"
        )
        for each in (trial(65), trial(129))
    ]
    code, launcher = run(fits(100), [*refused, trial(64), trial(128)], search=BY_16)
    assert (code, lengths(launcher)) == (0, [64, 128, 96, 112])
    assert {length for length, record in run.records().items() if record.status == "refused"} == {65, 129}


def test_other_failures_stop_nothing_unless_asked_for(run):
    trials = [trial(64), trial(128)]
    _, launcher = run({64: "timeout"}, trials, search=UNTIL_OOM)
    assert lengths(launcher) == [64, 128]
    _, launcher = run({64: "timeout"}, trials, search=Search(until="failure"))
    assert lengths(launcher) == [64]


@pytest.mark.parametrize("limit", [*range(60, 260, 7), 256, 512, 16, 15])
def test_bisection_finds_the_longest_length_that_trains(run, limit):
    planned = [64, 256, 512]
    _, launcher = run(fits(limit), [trial(length) for length in planned], search=BY_16)
    trained = [record.settings.seq_len for record in run.records().values() if record.status == "ok"]
    longest = max(trained, default=0)
    assert longest <= limit < (longest + 16 if limit < 512 else 10_000)
    assert len(lengths(launcher)) == len(set(lengths(launcher))) <= 9
    assert all(length % 16 == 0 for length in lengths(launcher))


def test_lengths_double_beyond_the_sweep_while_all_train(run):
    _, launcher = run(fits(700), [trial(64), trial(128)], search=Search(until="oom", bisect=128, at_most=4096))
    assert lengths(launcher) == [64, 128, 256, 512, 1024, 768, 640]
    assert run.records()[640].status == "ok"
    _, launcher = run(fits(9000), [trial(64)], search=Search(until="oom", bisect=128, at_most=300))
    assert lengths(launcher) == [64, 128, 256, 300]


def test_a_search_that_was_stopped_goes_on_where_it_was_and_its_trials_are_ordinary(run):
    trials = [trial(64), trial(1024)]
    whole = run(fits(500), trials, search=BY_16)[1]
    stops_at = lengths(whole)[4]
    run.run_dir = run.run_dir.with_name("again")
    _, first = run(fits(500) | {stops_at: "ctrl-c"}, trials, search=BY_16)
    assert lengths(first) == lengths(whole)[:5]
    _, rest = run(fits(500), trials, Resume(), search=BY_16)
    assert lengths(rest) == lengths(whole)[4:]
    assert set(RunDirectory(run.run_dir).description()["trials"]) == {
        record.trial_id for record in run.records().values()
    }
    assert run(fits(500), trials, Resume(), search=BY_16)[1].jobs == []


def test_trials_of_a_search_run_in_all_rounds(run):
    _, launcher = run(fits(100), [trial(64), trial(128)], search=BY_16, rounds=2)
    ran = lengths(launcher)
    assert ran[:5] == [64, 128, 96, 112, 64]
    assert sorted(ran[4:]) == [64, 96]
    assert {length: len(record.rounds) for length, record in run.records().items() if record.status == "ok"} == {
        64: 2, 96: 2
    }  # fmt: skip


def test_a_search_counts_towards_the_limit_of_trials_and_resume_goes_on(run):
    trials = [trial(64), trial(1024)]
    _, launcher = run(fits(500), trials, search=BY_16, bounds=Bounds(trials=3))
    assert len(launcher.jobs) == 3
    _, rest = run(fits(500), trials, Resume(), search=BY_16)
    assert 64 not in lengths(rest)
    assert max(length for length, record in run.records().items() if record.status == "ok") == 496


def test_a_length_that_fails_ends_the_search_of_its_group_and_a_retry_goes_on(run):
    trials = [trial(64), trial(128)]
    code, launcher = run(fits(100) | {96: "failed"}, trials, search=BY_16)
    assert (code, lengths(launcher)) == (1, [64, 128, 96])
    code, launcher = run(fits(100), trials, Resume(retry_failed=True), search=BY_16)
    assert (code, lengths(launcher)) == (0, [96, 112])


def test_a_length_that_the_method_cannot_split_is_refused_and_not_executed(run):
    settings = dataclasses.replace(trial(64).settings, cp_size=2, world_size=2, layout="zigzag")
    trials = [
        dataclasses.replace(trial(64), settings=dataclasses.replace(settings, seq_len=length)) for length in (64, 70)
    ]
    _, launcher = run({64: "ok", 70: "oom"}, trials, search=Search(until="oom", bisect=3))
    assert lengths(launcher) == [64, 70]
    record = run.records()[67]
    assert (record.status, record.launcher) == ("refused", "")
    assert "seq_len 67 does not split" in record.reason


def test_half_way_is_a_multiple_of_the_step_above_the_longest_that_trained():
    assert next_length(BY_16, {64: "ok", 128: "oom"}) == 96
    assert next_length(BY_16, {64: "ok", 81: "oom"}) == 80
    assert next_length(BY_16, {64: "ok", 80: "oom"}) is None
    assert next_length(BY_16, {128: "oom"}) == 64
    assert next_length(BY_16, {64: "ok"}) is None
    assert next_length(BY_16, {64: "oom", 128: "ok"}) is None  # what trained counts, whatever was before


EXPERIMENT = """\
task: train
model: tiny
sweep: {method: [burst], seq_len: [1k, 4k]}
fixed: {dtype: fp32}
"""


def test_the_section_is_read_and_written_again(tmp_path):
    path = tmp_path / "exp.yaml"
    path.write_text(EXPERIMENT + "search: {until: oom, bisect: 1k, at_most: 1M}\n")
    experiment = load_experiment(path)
    assert experiment.search == Search(until="oom", bisect=1024, at_most=1 << 20)
    path.write_text(experiment_text(experiment))
    assert load_experiment(path).search == experiment.search
    assert load_experiment(path, overrides=("search.until=failure",)).search.until == "failure"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("search: {until: memory}", "until is 'memory'; expected no, oom or failure"),
        ("search: {bisect: 1k}", r":5: search\.bisect and search\.at_most need search\.until; add until: oom"),
        ("search: {until: oom, at_most: 1M}", "search.at_most needs search.bisect"),
        ("search: {until: oom, bisct: 1k}", "unknown key search.bisct; did you mean bisect"),
        ("search: {until: oom, bisect: -1}", "expected at least 0"),
        ("search: {until: oom}", "search.until stops a sweep over seq_len"),
    ],
)
def test_a_section_that_means_nothing_is_refused_with_its_line(tmp_path, line, said):
    path = tmp_path / "exp.yaml"
    text = EXPERIMENT
    if line == "search: {until: oom}":
        text = text.replace(", seq_len: [1k, 4k]", "").replace("dtype", "seq_len: 1k, dtype")
    path.write_text(text + line + "\n")
    with pytest.raises(UsageError, match=said):
        load_experiment(path)


def test_records_of_a_search_belong_to_its_experiment_and_to_no_other(run):
    trials = [trial(64), trial(128)]
    run(fits(100), trials, search=BY_16)
    with pytest.raises(UsageError, match="2 records of trials that this experiment does not have"):
        run({}, [*trials, trial(256)], Resume(), machine=HERE)
    record = read_record(run.run_dir / "trials" / run.records()[96].trial_id / "record.json")
    assert record.status == "ok"
