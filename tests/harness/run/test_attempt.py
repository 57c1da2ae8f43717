"""What a trial that ended counts as: figures that were on disk before a step was traced are kept, whatever follows."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.files.progress import Progress
from engine.burst import METHOD
from engine.measurement import PROFILE, TRACE_FILE, UNCHECKED, Measurement, unfinished, write_measurement
from engine.settings import Steps, TrialSettings
from engine.shape import ModelShape
from harness.launch.launcher import Outcome
from harness.launch.supervisor import LocalLauncher, Patience, Supervisor
from harness.machine.this_machine import Machine
from harness.records.record import Record, Status
from harness.records.stated import NOTHING_STATED, caveats_of
from harness.records.stored import read_records
from harness.run.attempt import RunContext, completed, measured
from harness.run.directory import RunDirectory
from harness.run.execution import ExecutionOptions, Resume, run_experiment
from harness.run.progress import PlainView
from harness.spec.trial import Trial
from tests.engine.tasks.wrong_methods import CHECK_RAISES, CHECK_REFUSED, RIGHT, TILE_DROPPED
from tests.harness import synthetic_records
from tests.harness.run.unruly_method import (
    CHECK_RANK1_RAISES,
    HANGS_NOW,
    RANK1_KILLED,
    TRACED_HANGS,
    TRACED_RANK1_KILLED,
    TRACED_RANK1_RAISES,
    WELL,
)

SHAPE = ModelShape(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def outcome(status: Status, reason: str = "") -> Outcome:
    return Outcome(status=status, reason=reason, wall_seconds=9.0, hosts=["here"])


def figures(**extra: object) -> Measurement:
    return Measurement(step_seconds=[1.5], extra=extra)


@pytest.mark.parametrize("status", ["timeout", "failed", "oom", "host_oom", "node_lost"])
def test_figures_that_only_a_trace_was_to_follow_are_kept_with_the_reason(tmp_path: Path, status: Status) -> None:
    write_measurement(tmp_path, figures(profile=unfinished("extra_step")))
    ended, found = measured(outcome(status, "it was so"), METHOD, tmp_path)
    assert (ended.status, ended.reason) == ("ok", f"measured, and then {status}: it was so")
    assert found is not None
    assert found.step_seconds == [1.5]
    assert found.extra[PROFILE] == {
        "of": "extra_step",
        "reason": f"the trial ended while one more step was traced: {status}: it was so",
    }


def test_a_trace_that_was_read_stays_when_the_trial_ends_badly_after_it(tmp_path: Path) -> None:
    profile = {"of": "measured_step", "on": "gpu", "rank": 0, "span_seconds": 1.0, "seconds": {"idle": 1.0}}
    write_measurement(tmp_path, figures(profile=profile))
    ended, found = measured(outcome("timeout", "late"), METHOD, tmp_path)
    assert ended.status == "ok"
    assert found is not None
    assert found.extra[PROFILE] == profile


def test_without_a_trace_to_follow_only_a_good_end_counts(tmp_path: Path) -> None:
    assert measured(outcome("timeout", "late"), METHOD, tmp_path) == (outcome("timeout", "late"), None)
    for extra in ({}, {UNCHECKED: "the check was refused"}):
        write_measurement(tmp_path, figures(**extra))
        assert measured(outcome("timeout", "late"), METHOD, tmp_path) == (outcome("timeout", "late"), None)
        assert measured(outcome("ok"), METHOD, tmp_path) == (outcome("ok"), figures(**extra))


STOPPED = "stopped by the user; --resume runs it again"


def test_a_trial_that_the_user_stopped_ends_the_run_as_interrupted(tmp_path: Path) -> None:
    write_measurement(tmp_path, figures(profile=unfinished("extra_step")))
    assert measured(outcome("interrupted", STOPPED), METHOD, tmp_path) == (outcome("interrupted", STOPPED), None)


def test_a_resumed_run_keeps_the_figures_of_a_trial_that_was_stopped_while_its_trace_was_read(tmp_path: Path) -> None:
    stopped = synthetic_records.record(status="interrupted", reason=STOPPED)
    assert completed(stopped, tmp_path) == stopped  # nothing was measured
    write_measurement(tmp_path, figures(profile=unfinished("measured_step")))
    kept = completed(stopped, tmp_path)
    assert (kept.status, kept.reason) == ("ok", "measured, and then interrupted: stopped by the user")
    assert kept.measurement is not None
    assert kept.measurement.step_seconds == [1.5]
    assert set(kept.measurement.extra[PROFILE]) == {"of", "reason"}  # no trace
    failed = synthetic_records.record(status="failed", reason="no")
    assert completed(failed, tmp_path) == failed


@pytest.mark.parametrize("damage", [0, 9])
def test_the_trace_that_rank_0_left_tells_where_its_time_went(tmp_path: Path, damage: int) -> None:
    write_measurement(tmp_path, figures(profile=unfinished("measured_step")))
    kernel = {"ph": "X", "cat": "kernel", "name": "flash_bwd", "ts": 0.0, "dur": 3e6, "args": {}}
    trace = gzip.compress(json.dumps({"traceEvents": [kernel, kernel | {"ts": 4e6}]}).encode())
    (tmp_path / TRACE_FILE).write_bytes(trace[: len(trace) - damage])
    kept = completed(synthetic_records.record(status="interrupted", reason=STOPPED), tmp_path)
    assert kept.measurement is not None
    profile = kept.measurement.extra[PROFILE]
    assert profile["reason"] == (
        "the trial ended while the trace of the measured step was read: interrupted: stopped by the user"
    )
    found = (profile.get("on"), profile.get("rank"), profile.get("span_seconds"))
    assert found == ((None, None, None) if damage else ("gpu", 0, 7.0))
    if not damage:
        assert profile["seconds"]["idle"] == 1.0


def test_figures_of_an_earlier_attempt_are_not_taken_for_those_of_this_one(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.begin_attempt("one")
    write_measurement(directory.trial("one"), figures(profile=unfinished("extra_step")))
    assert directory.begin_attempt("one") == 2
    late = outcome("timeout", "late")
    assert measured(late, METHOD, directory.trial("one")) == (late, None)


@pytest.fixture(scope="module")
def launcher():
    supervisor = Supervisor({**os.environ, **ENVIRONMENT}, patience=Patience(failure=1.5, terminate=0.5, poll=0.02))
    launcher = LocalLauncher(supervisor)
    yield launcher
    launcher.close()


def trial(seed: int, measured: int = 2) -> Trial:
    settings = TrialSettings(
        task="train", method="burst", model=SHAPE, seq_len=64, dtype="fp32", cp_size=2, seed=seed,
        steps=Steps(warmup=0, measured=measured), learning_rate=1e-2,
    )  # fmt: skip
    return Trial(experiment="exp", title="E", settings=settings, deadline_seconds=3600, profile=True)


def run(launcher: LocalLauncher, run_dir: Path, trials: list[Trial], resume: Resume | None = None) -> list[Record]:
    host = RunContext(
        machine=Machine(hostname="here", device="cpu", cores=2, memory_gib=8.0),
        launcher=launcher,
        environment=ENVIRONMENT,
        commit="abc",
    )
    view = PlainView(Progress("", out=lambda _: None))
    run_experiment(
        "exp",
        trials,
        host,
        run_dir,
        view=view,
        say=lambda _: None,
        resume=resume,
        options=ExecutionOptions(shuffle=lambda _: None),
    )  # in the order of the plan
    records = {record.trial_id: record for record in read_records(run_dir)}
    return [records[each.id] for each in trials]


def late_once_it_hangs(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    """The launcher's clock jumps ahead of every deadline when a rank says that it hangs."""

    def monotonic() -> float:
        hangs = log.exists() and HANGS_NOW in log.read_text()
        return time.monotonic() + (1e6 if hangs else 0.0)

    clock = SimpleNamespace(monotonic=monotonic, time=time.time)
    monkeypatch.setattr("harness.launch.supervisor.time", clock)


def test_ranks_that_end_cost_no_figures_that_they_left_and_the_next_trial_has_fresh_ones(
    launcher, tmp_path, monkeypatch
):
    monkeypatch.setattr("harness.run.attempt.method_module", lambda _name: "tests.harness.run.unruly_method")
    traced = [trial(kind) for kind in (WELL, TRACED_HANGS, TRACED_RANK1_RAISES, TRACED_RANK1_KILLED)]
    checked = [
        replace(one, settings=replace(one.settings, task="attention"), profile=profile)
        for one, profile in ((trial(CHECK_RANK1_RAISES), True), (trial(100 + CHECK_RANK1_RAISES), False))
    ]
    # Of which the only step is the traced one; and one whose ranks are killed before they measured anything.
    without = [trial(TRACED_RANK1_RAISES, 1), trial(RANK1_KILLED)]
    trials = [*traced, *checked, *without, trial(WELL, 1)]
    late_once_it_hangs(monkeypatch, tmp_path / "run" / "trials" / traced[1].id / "logs" / "rank0.log")
    records = run(launcher, tmp_path / "run", trials)
    assert [record.status for record in records] == [*["ok"] * 6, "failed", "failed", "ok"]
    lost, killed, last = records[6:]
    assert (lost.measurement, killed.measurement) == (None, None)
    assert killed.reason.startswith("rank 1 was killed by SIGKILL before its first step")
    assert last.measurement is not None
    assert last.measurement.extra[PROFILE]["of"] == "measured_step"
    assert last.measurement.extra[PROFILE]["span_seconds"] > 0

    extras = []
    for record in records[:6]:
        assert record.measurement is not None
        assert len(record.measurement.step_seconds) == 2
        extras.append(record.measurement.extra)
    assert extras[0][PROFILE]["span_seconds"] > 0
    how = ["timeout: not finished within its 3600 s", "failed: rank 1", "failed: rank 1 was killed"]
    for cut, words in zip((1, 2, 3), how, strict=True):
        assert records[cut].reason.startswith(f"measured, and then {words}")
        assert extras[cut][PROFILE]["of"] == "extra_step"
        assert extras[cut][PROFILE]["reason"].startswith(f"the trial ended while one more step was traced: {words}")
    for cut in (4, 5):
        assert records[cut].reason.startswith("measured, and then failed: rank 1: RuntimeError: planned")
        assert "error" not in extras[cut]
        assert extras[cut][UNCHECKED].startswith("failed: rank 1: RuntimeError: planned")

    kept = [*trials[:6], trials[-1]]
    assert run(launcher, tmp_path / "run", kept, Resume(retry_failed=True, mix=True)) == [*records[:6], last]


def test_the_check_of_a_training_trial_is_recorded_and_its_failure_costs_no_figures(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr("harness.run.attempt.method_module", lambda _name: "tests.engine.tasks.wrong_methods")
    kinds = [RIGHT, TILE_DROPPED, CHECK_RAISES, CHECK_REFUSED]
    trials = []
    for kind in kinds:
        settings = dataclasses.replace(trial(kind).settings, steps=Steps(warmup=1, measured=2))
        trials.append(dataclasses.replace(trial(kind), settings=settings, profile=False))
    records = run(launcher, tmp_path / "run", trials)
    assert [record.status for record in records] == ["ok", "wrong", "ok", "ok"]
    extras = []
    for record in records:
        assert record.measurement is not None
        assert len(record.measurement.step_seconds) == 2
        extras.append(record.measurement.extra)
    assert "the final hidden state is off by" in records[1].reason
    cut_off = "oom: rank 1: MemoryError: planned"
    assert [extra.get(UNCHECKED) for extra in extras] == [None, None, cut_off, "refused as planned"]
    assert records[2].reason == "measured, and then oom: rank 1: MemoryError: planned"
    said = caveats_of(records[2], NOTHING_STATED)
    assert f"not compared with float64 ({cut_off})" in said
    assert records[2].reason in said
