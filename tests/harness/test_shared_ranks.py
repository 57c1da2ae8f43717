"""Ranks that serve several trials: real workers under a real supervisor, in every way a trial among others can end."""

import contextlib
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from engine.measurement import read_measurement
from engine.settings import ModelShape, Steps, TrialSettings, to_json
from harness.launch.forkserver import ForkServer
from harness.launch.launcher import Job, Part
from harness.launch.ports import reserve_port
from harness.launch.ranks import Ranks
from harness.launch.supervisor import Patience, Supervisor
from tests.harness.unruly_method import (
    ALL_REFUSE,
    HANGS,
    RANK1_KILLED,
    RANK1_OUT_OF_MEMORY,
    RANK1_RAISES,
    RANK1_REFUSES,
    WELL,
)
from tests.patience import AMPLE, running, scaled, wait_for_end, wait_until
from tests.processes import listens_on

SHAPE = ModelShape(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def supervisor():
    """One for all tests, because its fork server takes seconds to load torch. Tests share no ranks: `trials`."""
    supervisor = Supervisor(
        {**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        patience=Patience(failure=scaled(1.5), terminate=scaled(0.5), poll=0.02),
    )
    yield supervisor
    supervisor.close()


class Trials:
    """Jobs of one test, each with a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, seed: int, ranks: int = 2, deadline: float = AMPLE, share: str | None = "", **settings) -> Job:
        fields = {"task": "attention", "method": "burst", "model": SHAPE, "seq_len": 64, "dtype": "fp32"}
        steps = Steps(warmup=0, measured=1)
        trial = TrialSettings(**{**fields, "cp_size": ranks, "steps": steps, "seed": seed, **settings})
        trial_dir = self.directory / str(len(list(self.directory.iterdir())))
        trial_dir.mkdir()
        (trial_dir / "trial.json").write_text(
            json.dumps({"settings": to_json(trial), "method": "tests.harness.unruly_method"})
        )
        return Job(
            trial_id=trial_dir.name,
            trial_dir=trial_dir,
            command=[sys.executable, "-m", "engine.worker", str(trial_dir)],
            ranks=ranks,
            environment=ENVIRONMENT,
            deadline_seconds=deadline,
            share=None if share is None else f"{self.directory}{share}",
        )


@pytest.fixture
def trials(tmp_path):
    return Trials(tmp_path)


def processes(job: Job) -> list[int]:
    """Of each rank that got as far as printing it: which process it was, found in the log of this very trial."""
    logs = [(job.trial_dir / "logs" / f"rank{rank}.log").read_text() for rank in range(job.ranks)]
    found = [re.findall(r"process (\d+) runs", log) for log in logs]
    assert all(len(each) == 1 for each in found), logs
    return [int(pid) for [pid] in found]


def test_jobs_of_one_kind_are_run_by_the_same_processes_and_others_by_new_ones(supervisor, trials):
    one = {"ranks": 1, "share": "other"}
    jobs = [trials(WELL), trials(WELL, cp_size=1, world_size=2), trials(WELL, **one), trials(WELL, **one)]
    outcomes, seen = [], []
    for job in jobs:
        lines: list[dict[str, object]] = []
        outcomes.append(supervisor.run(job, lines.append))
        seen.append([(line["step"], line["of"]) for line in lines if "phase" not in line])  # one of a busy machine
    assert [(outcome.status, outcome.reason, outcome.turn) for outcome in outcomes] == [
        ("ok", "", 1),
        ("ok", "", 2),
        ("ok", "", 1),
        ("ok", "", 2),
    ]
    assert seen == [[(0, 1), (1, 1)]] * 4
    pairs, alone = processes(jobs[0]), processes(jobs[2])
    assert processes(jobs[1]) == pairs
    assert processes(jobs[3]) == alone
    assert not set(pairs) & set(alone)
    assert not any(map(running, pairs))  # they would hold memory while others are measured
    for job in jobs:
        assert max(read_measurement(job.trial_dir).extra["error"].values()) < 1e-6


@pytest.mark.parametrize(
    ("address", "share"), [("127.0.0.1", None), ("127.0.0.1", "x"), ("127.0.0.2", None)], ids=["own", "shared", "part"]
)
def test_ranks_wait_for_connections_on_loopback_or_on_the_address_of_their_host_alone(
    supervisor, trials, address, share
):
    job = trials(HANGS, share=share)
    with contextlib.ExitStack() as held:
        if address != "127.0.0.1":
            port = held.enter_context(reserve_port())
            job = Job(**{**fields_of(job), "part": Part(first_rank=0, ranks=2, address=address, port=port)})
        running_job = threading.Thread(target=supervisor.run, args=(job,))
        running_job.start()
        held.callback(running_job.join)
        held.callback(supervisor.cancel)
        logs = [job.trial_dir / "logs" / f"rank{rank}.log" for rank in range(2)]
        wait_until(
            lambda: all(log.exists() and " runs seed" in log.read_text() for log in logs), "the ranks have not joined"
        )
        found = [listens_on(pid) for pid in processes(job)]
    assert address in found[0]  # rank 0's store
    assert set().union(*found) <= {"127.0.0.1", address}


def of_a_set_of(ranks: int, job: Job) -> Job:
    return Job(**{**fields_of(job), "set_ranks": ranks})


def test_jobs_with_fewer_ranks_run_on_the_first_of_them_and_the_others_write_nothing(supervisor, trials):
    sizes = [1, 2, 4, 1, 4, 2]
    jobs = [of_a_set_of(4, trials(WELL, ranks=ranks)) for ranks in sizes]
    outcomes = [supervisor.run(job) for job in jobs]
    assert [(outcome.status, outcome.reason, outcome.turn, outcome.idle_ranks) for outcome in outcomes] == [
        ("ok", "", turn, 4 - ranks) for turn, ranks in enumerate(sizes, start=1)
    ]
    everyone = processes(jobs[2])
    assert len(set(everyone)) == 4
    for job, ranks in zip(jobs, sizes, strict=True):
        assert processes(job) == everyone[:ranks]
        assert {path.name for path in (job.trial_dir / "logs").iterdir()} == {
            f"rank{rank}.log" for rank in range(ranks)
        }
        assert not (job.trial_dir / "errors").exists()
        measured = read_measurement(job.trial_dir)
        assert len(measured.peak_rss_bytes) == len(measured.sent_bytes) == ranks
        assert max(measured.extra["error"].values()) < 1e-6
        if ranks > 1:
            assert min(measured.sent_bytes) > 0


def test_a_set_of_ranks_is_replaced_where_a_job_needs_more(supervisor, trials):
    small, large, again = trials(WELL, ranks=1), trials(WELL), trials(WELL, ranks=1)
    assert [supervisor.run(job).turn for job in (small, large, again)] == [1, 1, 2]
    assert not running(processes(small)[0])
    assert processes(again) == processes(large)[:1]


def test_jobs_that_need_ranks_of_equal_history_share_with_smaller_ones_but_not_with_another_size(supervisor, trials):
    def job(ranks: int) -> Job:
        return Job(**{**fields_of(of_a_set_of(3, trials(WELL, ranks=ranks, seq_len=24 * 4))), "same_size": ranks > 1})

    turns = [(ranks, supervisor.run(job(ranks)).turn) for ranks in (1, 2, 1, 2, 3, 1, 2)]
    assert turns == [(1, 1), (2, 2), (1, 3), (2, 4), (3, 1), (1, 2), (2, 1)]


@pytest.mark.parametrize("difference", ["share", "emulate_nodes", "environment", "none"])
def test_ranks_are_shared_only_where_all_that_makes_them_is_equal(supervisor, trials, difference):
    first, second = trials(WELL), trials(WELL)
    if difference == "share":
        second = trials(WELL, share="other")
    elif difference == "emulate_nodes":
        second = Job(**{**fields_of(second), "emulate_nodes": 2})
    elif difference == "environment":
        second = Job(**{**fields_of(second), "environment": {**ENVIRONMENT, "NCCL_DEBUG": "WARN"}})
    assert supervisor.run(first).status == supervisor.run(second).status == "ok"
    assert (processes(first) == processes(second)) == (difference == "none")


def fields_of(job: Job) -> dict[str, object]:
    return {name: getattr(job, name) for name in Job.__slots__}


def test_jobs_that_may_not_share_get_ranks_of_their_own(supervisor, trials):
    first, second = trials(WELL, share=None), trials(WELL, share=None)
    assert [supervisor.run(job).turn for job in (first, second)] == [0, 0]
    assert not set(processes(first)) & set(processes(second))


def test_a_part_of_a_job_over_several_hosts_and_a_foreign_program_share_nothing(trials):
    job = trials(WELL)
    part = Part(first_rank=0, ranks=1, address="127.0.0.1", port=1)
    with contextlib.closing(ForkServer(os.environ, ())) as server:
        for other in ({"part": part}, {"command": [sys.executable, "-m", "other.worker", str(job.trial_dir)]}):
            ranks = Ranks(server, Job(**{**fields_of(job), **other}))
            assert not ranks.suit(job)
            assert ranks.turn == 0


@pytest.mark.parametrize(
    ("seed", "status", "reason"),
    [
        (RANK1_RAISES, "failed", "rank 1: RuntimeError: planned"),
        (RANK1_OUT_OF_MEMORY, "oom", "rank 1: MemoryError: planned"),
        (RANK1_KILLED, "failed", "rank 1 was killed by SIGKILL before its first step"),
        (RANK1_REFUSES, "refused", "refused as planned"),
        (HANGS, "timeout", "not finished within its {deadline:g} s before its first step"),
    ],
)
def test_a_trial_that_goes_wrong_among_others_costs_them_nothing(supervisor, trials, seed, status, reason):
    deadline = scaled(3.0) if seed == HANGS else AMPLE
    jobs = [trials(WELL), trials(seed, deadline=deadline), trials(WELL), trials(WELL)]
    outcomes = [supervisor.run(job) for job in jobs]
    assert [(outcome.status, outcome.turn) for outcome in outcomes] == [("ok", 1), (status, 2), ("ok", 1), ("ok", 2)]
    assert reason.format(deadline=deadline) in outcomes[1].reason
    before, wrong, after, last = map(processes, jobs)
    assert before == wrong
    assert after == last
    assert not set(before) & set(after)
    assert not any(map(running, before))
    if status == "timeout":  # the log says where each rank was
        logs = [path.read_text() for path in sorted((jobs[1].trial_dir / "logs").glob("rank*.log"))]
        assert len(logs) == 2
        assert all("most recent call first" in log for log in logs)


@pytest.mark.parametrize(
    ("seed", "status"), [(RANK1_RAISES, "failed"), (RANK1_KILLED, "failed"), (RANK1_OUT_OF_MEMORY, "oom")]
)
def test_a_small_trial_that_goes_wrong_ends_the_ranks_that_wait_too(supervisor, trials, seed, status):
    jobs = [trials(WELL, ranks=3, seq_len=96), trials(seed, ranks=2), trials(WELL, ranks=2), trials(WELL, ranks=1)]
    outcomes = [supervisor.run(of_a_set_of(3, job)) for job in jobs]
    assert [(outcome.status, outcome.turn, outcome.idle_ranks) for outcome in outcomes] == [
        ("ok", 1, 0),
        (status, 2, 1),
        ("ok", 1, 1),
        ("ok", 2, 2),
    ]
    assert "rank 1" in outcomes[1].reason
    assert not any(map(running, processes(jobs[0])))
    assert processes(jobs[3]) == processes(jobs[2])[:1]
    assert {path.name for path in (jobs[1].trial_dir / "logs").iterdir()} == {"rank0.log", "rank1.log"}


def test_a_small_trial_that_hangs_is_explained_by_its_own_ranks(supervisor, trials):
    large = of_a_set_of(3, trials(WELL, ranks=3, seq_len=96))
    hanging = of_a_set_of(3, trials(HANGS, ranks=2, deadline=scaled(3.0)))
    assert supervisor.run(large).status == "ok"
    quiet = (large.trial_dir / "logs" / "rank2.log").read_text()
    outcome = supervisor.run(hanging)
    assert outcome.status == "timeout"
    assert "rank 2" not in outcome.reason
    for folder in ("logs", "stacks"):
        found = {path.stem for path in (hanging.trial_dir / folder).glob("rank*")}
        assert found == {"rank0", "rank1"}
    assert (large.trial_dir / "logs" / "rank2.log").read_text() == quiet  # its stack is no part of either trial
    assert not any(map(running, processes(large)))


def test_a_rank_that_dies_while_it_has_no_part_costs_no_trial(supervisor, trials):
    large, small, after = trials(WELL, ranks=2), trials(WELL, ranks=1), trials(WELL, ranks=1)
    supervisor.run(large)

    def kill_the_idle_one(line: dict[str, object]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes(large)[1], signal.SIGKILL)
        wait_for_end([processes(large)[1]])

    outcome = supervisor.run(small, kill_the_idle_one)
    assert (outcome.status, outcome.turn, outcome.idle_ranks) == ("ok", 2, 1)
    assert supervisor.run(after).turn == 1


def test_a_trial_that_all_ranks_refuse_leaves_them_to_the_next(supervisor, trials):
    jobs = [trials(ALL_REFUSE), trials(WELL), trials(ALL_REFUSE), trials(WELL)]
    outcomes = [supervisor.run(job) for job in jobs]
    assert [(outcome.status, outcome.turn) for outcome in outcomes] == [
        ("refused", 1),
        ("ok", 2),
        ("refused", 3),
        ("ok", 4),
    ]
    assert outcomes[0].reason == outcomes[2].reason == "refused as planned"
    assert len({tuple(processes(job)) for job in jobs}) == 1


def test_a_rank_that_dies_in_waiting_costs_no_trial(supervisor, trials):
    first, second = trials(WELL), trials(WELL)
    supervisor.run(first)
    os.kill(processes(first)[1], signal.SIGKILL)
    wait_for_end([processes(first)[1]])
    outcome = supervisor.run(second)
    assert (outcome.status, outcome.turn) == ("ok", 1)
    assert not any(map(running, processes(first)))


def test_a_fork_server_that_dies_in_waiting_costs_no_trial(supervisor, trials):
    first, second = trials(WELL), trials(WELL)
    supervisor.run(first)
    status = Path(f"/proc/{processes(first)[0]}/status").read_text()
    os.kill(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid")), signal.SIGKILL)
    wait_for_end(processes(first))
    outcome = supervisor.run(second)
    assert (outcome.status, outcome.turn) == ("ok", 1)


def test_cancelling_interrupts_the_running_trial_alone(supervisor, trials):
    first, hanging, last = trials(WELL), trials(HANGS), trials(WELL)
    supervisor.run(first)

    def cancel() -> None:
        log = hanging.trial_dir / "logs" / "rank0.log"
        wait_until(lambda: log.exists() and "runs seed" in log.read_text(), "the trial has not begun")
        supervisor.cancel()

    canceller = threading.Thread(target=cancel)
    canceller.start()
    outcome = supervisor.run(hanging)
    canceller.join()
    assert (outcome.status, outcome.turn) == ("interrupted", 2)
    assert not any(map(running, processes(first)))
    assert supervisor.run(last).status == "ok"


def test_ranks_in_waiting_end_with_their_supervisor(supervisor, trials):
    job = trials(WELL)
    supervisor.run(job)
    assert all(map(running, processes(job)))
    supervisor.close()
    assert not any(map(running, processes(job)))
