"""A run whose trials share ranks leaves what a run with fresh ranks leaves: the same figures, one record per trial."""

import os
import re
from pathlib import Path

import pytest

from engine.settings import ModelShape, Steps, TrialSettings
from harness.launch.supervisor import LocalLauncher, Supervisor
from harness.machine.this_machine import Machine
from harness.records.record import Record
from harness.records.stored import read_records
from harness.report.results import row_of
from harness.run.attempt import RunContext
from harness.run.execution import ExecutionOptions, Resume
from harness.run.experiment import run_experiment
from harness.run.progress import PlainView
from harness.spec.trial import Trial
from tests.patience import AMPLE

SHAPE = ModelShape(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def launcher():
    """One for all tests: its fork servers take seconds to load torch."""
    launcher = LocalLauncher(Supervisor({**os.environ, **ENVIRONMENT}))
    yield launcher
    launcher.close()


class StopsAt(PlainView):
    """Ctrl-C during the first step of one trial."""

    def __init__(self, console, trial_id: str = "") -> None:
        super().__init__(console)
        self.trial_id, self.running = trial_id, ""

    def trial_began(self, trial: Trial) -> None:
        self.running = trial.id

    def step(self, line: dict[str, object]) -> None:
        if self.running == self.trial_id:
            raise KeyboardInterrupt


def trial(ranks: int = 2, share: bool = True, **changes) -> Trial:
    fields = {"task": "train", "method": "burst", "model": SHAPE, "seq_len": 64, "dtype": "fp32", "cp_size": ranks}
    settings = TrialSettings(**{**fields, "steps": Steps(warmup=1, measured=2), "learning_rate": 1e-2, **changes})
    return Trial(experiment="exp", title="E", settings=settings, deadline_seconds=AMPLE, share_ranks=share)


def run(
    launcher, run_dir: Path, trials: list[Trial], resume: Resume | None = None, stop: str = "", rounds: int = 1
) -> list[Record]:
    """Records in the order of the trials; those that none was left for are missing."""
    from rich.console import Console

    run_experiment(
        "exp",
        trials,
        RunContext(
            machine=Machine(hostname="here", device="cpu", cores=4, memory_gib=8.0),
            launcher=launcher,
            environment=ENVIRONMENT,
            commit="abc",
        ),
        run_dir,
        view=StopsAt(Console(quiet=True), stop),
        say=lambda _: None,
        resume=resume,
        options=ExecutionOptions(shuffle=lambda _: None, rounds=rounds),  # the order of the plan
    )
    records = {record.trial_id: record for record in read_records(run_dir)}
    return [records[each.id] for each in trials if each.id in records]


def outcomes(records: list[Record]) -> list[tuple[str, int]]:
    return [(record.status, record.ranks_turn) for record in records]


def test_a_sweep_in_shared_ranks_measures_what_fresh_ranks_measure(launcher, tmp_path):
    def sweep(share: bool) -> list[Trial]:
        return [
            trial(2, share),
            trial(2, share, task="attention", method="ulysses"),
            trial(1, share, task="attention"),
            trial(4, share),
            trial(2, share, cp_size=1, world_size=2, sharding="hybrid"),
            trial(1, share, seq_len=32),
            trial(4, share, task="attention"),
            trial(2, share, seq_len=128),
            trial(1, share),
            trial(2, share, emulate_nodes=2),  # on two nodes, which ranks of a set of four would divide otherwise
            trial(2, share, deterministic=True),  # cannot be taken on by ranks that ran otherwise
        ]

    shared, fresh = (run(launcher, tmp_path / str(share), sweep(share)) for share in (True, False))
    assert outcomes(shared) == [*(("ok", turn) for turn in range(1, 10)), ("ok", 1), ("ok", 1)]
    assert [record.idle_ranks for record in shared] == [2, 2, 3, 0, 2, 3, 0, 2, 3, 0, 0]
    assert outcomes(fresh) == [("ok", 0)] * 11
    assert not any(record.idle_ranks for record in fresh)
    for ours, theirs in zip(shared, fresh, strict=True):
        assert ours.measurement is not None
        assert theirs.measurement is not None
        assert ours.trial_id == theirs.trial_id
        assert ours.command == theirs.command == ["python", "-m", "engine.worker", "TRIAL_DIR"]
        for figure in ("loss", "grad_norm", "chosen", "sent_bytes"):
            assert getattr(ours.measurement, figure) == getattr(theirs.measurement, figure)
        assert ours.measurement.extra.get("error") == theirs.measurement.extra.get("error")
        ranks = ours.settings.world_size
        assert len(ours.measurement.peak_rss_bytes) == len(theirs.measurement.peak_rss_bytes) == ranks
        assert ours.hosts == theirs.hosts
        assert ours.environment == theirs.environment
        assert {path.name for path in (tmp_path / "True" / "trials" / ours.trial_id / "logs").iterdir()} == {
            f"rank{rank}.log" for rank in range(ranks)
        }
        assert len(ours.measurement.step_seconds) == 2
        log = tmp_path / "True" / "trials" / ours.trial_id / "logs" / "rank0.log"
        start = ["start of the process and its imports"] if ours.ranks_turn == 1 else []
        assert re.findall(r"s: (.+) took", log.read_text()) == [
            *start,
            "joining the other ranks",
            "building the task",
            "warm-up and measuring",
            "the check against float64",
            "giving back memory and process groups",
        ]


def test_a_failure_in_the_middle_and_ctrl_c_after_it_leave_a_state_that_resumes(launcher, tmp_path):
    trials = [trial(seed=0), trial(seed=1, learning_rate=1e30), trial(seed=2), trial(seed=3), trial(seed=4)]
    first = run(launcher, tmp_path / "run", trials, stop=trials[3].id)
    assert [record.status for record in first] == ["ok", "failed", "ok", "interrupted"]
    assert [record.ranks_turn for record in first[:3]] == [1, 2, 1]
    assert "FloatingPointError" in first[1].reason

    resumed = run(launcher, tmp_path / "run", trials, Resume())
    assert outcomes(resumed) == [("ok", 1), ("failed", 2), ("ok", 1), ("ok", 1), ("ok", 2)]
    assert [record.attempts for record in resumed] == [1, 1, 1, 2, 1]


def test_trials_of_several_sizes_share_ranks_over_a_failure_and_ctrl_c_and_a_second_round(launcher, tmp_path):
    trials = [
        trial(1, seed=0),
        trial(2, seed=1, learning_rate=1e30),
        trial(1, seed=2),
        trial(4, seed=3),
        trial(2, seed=4),
    ]
    run(launcher, tmp_path / "before", [trial(1, share=False)])  # no ranks of another test wait
    first = run(launcher, tmp_path / "run", trials, stop=trials[3].id)
    assert [(record.status, record.ranks_turn, record.idle_ranks) for record in first[:3]] == [
        ("ok", 1, 3),
        ("failed", 2, 2),
        ("ok", 1, 3),
    ]
    assert first[3].status == "interrupted"
    assert "FloatingPointError" in first[1].reason
    resumed = run(launcher, tmp_path / "run", trials, Resume(), rounds=2)
    assert [record.status for record in resumed] == ["ok", "failed", "ok", "ok", "ok"]
    # The resumed first round runs the last two, and the second round goes on with the same ranks.
    assert [(record.ranks_turn, record.idle_ranks) for record in resumed] == [(3, 3), (2, 2), (4, 3), (5, 0), (6, 2)]
    assert [len(record.rounds) for record in resumed] == [2, 1, 2, 2, 2]
    assert [row_of(record)["idle_ranks"] for record in resumed] == [3, 2, 3, None, 2]
