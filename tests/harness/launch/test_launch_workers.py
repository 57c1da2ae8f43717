"""Real workers under a real supervisor, in every way a trial among others can end."""

import contextlib
import json
import os
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from engine.measurement import read_measurement
from engine.settings import Steps, TrialSettings, to_json
from engine.shape import ModelShape
from harness.launch.launcher import Job, Part
from harness.launch.ports import reserve_port
from harness.launch.supervisor import Patience, Supervisor
from tests.harness.run.unruly_method import (
    ALL_REFUSE,
    HANGS,
    RANK1_KILLED,
    RANK1_OUT_OF_MEMORY,
    RANK1_RAISES,
    RANK1_REFUSES,
    WELL,
)
from tests.patience import AMPLE, running, scaled, wait_until
from tests.processes import listens_on

SHAPE = ModelShape(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def supervisor():
    """One for all tests, because its fork server takes seconds to load torch."""
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

    def __call__(self, seed: int, ranks: int = 2, deadline: float = AMPLE, **settings) -> Job:
        fields = {"task": "attention", "method": "burst", "model": SHAPE, "seq_len": 64, "dtype": "fp32"}
        steps = Steps(warmup=0, measured=1)
        trial = TrialSettings(**{**fields, "cp_size": ranks, "steps": steps, "seed": seed, **settings})
        trial_dir = self.directory / str(len(list(self.directory.iterdir())))
        trial_dir.mkdir()
        (trial_dir / "trial.json").write_text(
            json.dumps({"settings": to_json(trial), "method": "tests.harness.run.unruly_method"})
        )
        return Job(
            trial_id=trial_dir.name,
            trial_dir=trial_dir,
            command=[sys.executable, "-m", "engine.worker", str(trial_dir)],
            ranks=ranks,
            environment=ENVIRONMENT,
            deadline_seconds=deadline,
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


def test_every_trial_has_processes_of_its_own_which_end_with_it(supervisor, trials):
    jobs = [trials(WELL), trials(WELL), trials(WELL, ranks=1)]
    seen = []
    for job in jobs:
        lines: list[dict[str, object]] = []
        outcome = supervisor.run(job, lines.append)
        assert (outcome.status, outcome.reason) == ("ok", "")
        assert max(read_measurement(job.trial_dir).extra["error"].values()) < 1e-6
        assert not any(map(running, processes(job)))  # they would hold memory while others are measured
        seen.append([(line["step"], line["of"]) for line in lines if "phase" not in line])  # one of a busy machine
    assert seen == [[(0, 1), (1, 1)]] * 3
    assert len({pid for job in jobs for pid in processes(job)}) == 5


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"], ids=["own", "part"])
def test_ranks_wait_for_connections_on_loopback_or_on_the_address_of_their_host_alone(supervisor, trials, address):
    job = trials(HANGS)
    with contextlib.ExitStack() as held:
        if address != "127.0.0.1":
            port = held.enter_context(reserve_port())
            job = replace(job, part=Part(first_rank=0, ranks=2, address=address, port=port))
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


ENDS = {
    RANK1_RAISES: ("failed", "rank 1: RuntimeError: planned"),
    RANK1_OUT_OF_MEMORY: ("oom", "rank 1: MemoryError: planned"),
    RANK1_KILLED: ("failed", "rank 1 was killed by SIGKILL before its first step"),
    RANK1_REFUSES: ("refused", "refused as planned"),
    ALL_REFUSE: ("refused", "refused as planned"),
    HANGS: ("timeout", "not finished within its {deadline:g} s before its first step"),
}


def test_trials_that_go_wrong_one_after_another_cost_the_others_nothing(supervisor, trials):
    deadline = scaled(3.0)
    jobs = [trials(WELL), *(trials(seed, deadline=deadline if seed == HANGS else AMPLE) for seed in ENDS), trials(WELL)]
    outcomes = [supervisor.run(job) for job in jobs]
    assert [outcome.status for outcome in outcomes] == ["ok", *(status for status, _ in ENDS.values()), "ok"]
    for job, outcome, (_, reason) in zip(jobs[1:], outcomes[1:], ENDS.values(), strict=False):
        assert reason.format(deadline=deadline) in outcome.reason
        assert not any(map(running, processes(job)))
    logs = [path.read_text() for path in sorted((jobs[-2].trial_dir / "logs").glob("rank*.log"))]
    assert len(logs) == 2
    assert all("most recent call first" in log for log in logs)  # of the one that hung: where each rank was
