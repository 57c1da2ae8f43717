"""Trials that run at the same time on disjoint parts of a machine."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.measurement import Measurement, write_measurement
from harness.base.errors import UsageError
from harness.launch.launcher import Job, Outcome
from harness.machine.this_machine import Machine
from harness.records.caveats import caveats_of
from harness.records.record import read_record
from harness.records.stated import NOTHING_STATED
from harness.records.stored import read_records
from harness.run.attempt import RunContext
from harness.run.execution import ExecutionOptions
from harness.run.experiment import run_experiment
from harness.run.lanes import lanes_of
from harness.run.progress import PlainView
from harness.spec.repetition import Repetition
from harness.spec.search import Search
from harness.spec.trial import Trial
from tests.harness.test_run_bounds import PROJECT
from tests.harness.test_run_experiment import in_order
from tests.harness.test_run_search import trial
from tests.patience import AMPLE, SOON

FOUR = Machine(
    hostname="gpu01", device="cuda", cores=8, memory_gib=64.0, gpu_name="NVIDIA H200", gpu_count=4, gpu_memory_gib=140.0
)


class Meeting:
    """A launcher whose jobs end when as many as there are lanes run at once; notes ranks and GPUs of each in `log`, and
    the seeds of those that met."""

    name = "meeting"

    def __init__(self, meet: threading.Barrier | None, log: list[tuple[int, str]], met: list[int]) -> None:
        self.meet, self.log, self.met = meet, log, met

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        self.met.append(json.loads((job.trial_dir / "trial.json").read_text())["settings"]["seed"])
        if self.meet is not None:
            self.meet.wait(SOON * 10)
        self.log.append((job.ranks, job.environment.get("CUDA_VISIBLE_DEVICES", "")))
        write_measurement(job.trial_dir, Measurement(step_seconds=[0.5], loss=[1.0]))
        return Outcome(status="ok", reason="", wall_seconds=1.0, hosts=["here"])

    def close(self) -> None:
        pass


def wide(seq_len: int, ranks: int) -> Trial:
    return replace(trial(seq_len), settings=replace(trial(seq_len).settings, cp_size=ranks, world_size=ranks))


def execute(
    run_dir: Path, trials: list[Trial], number: int, met: list[int] | None = None, **options: object
) -> list[tuple[int, str]]:
    from rich.console import Console

    log: list[tuple[int, str]] = []
    met = [] if met is None else met
    meet = threading.Barrier(number)
    host = RunContext(machine=FOUR, launcher=Meeting(None, log, met), environment={}, commit="abc")
    lanes = [replace(lane, launcher=Meeting(meet, log, met)) for lane in lanes_of(host, number)]
    code = run_experiment(
        "exp", trials, host, run_dir, view=PlainView(Console(quiet=True)), say=lambda _: None,
        options=ExecutionOptions(shuffle=in_order, lanes=lanes, **options),  # type: ignore[arg-type]
    )  # fmt: skip
    assert code == 0
    return log


def test_trials_run_at_the_same_time_on_disjoint_gpus_and_their_records_say_so(tmp_path):
    log = execute(tmp_path / "run", [trial(length) for length in (16, 32, 64, 128)], 2, repetition=Repetition(rounds=2))
    assert len(log) == 8  # each met another, or its job would not have ended
    assert {gpus for _, gpus in log} == {"0,1", "2,3"}
    records = read_records(tmp_path / "run")
    assert [(record.status, record.lanes, len(record.rounds)) for record in records] == [("ok", 2, 2)] * 4
    assert all(
        "up to 2 trials ran on parts of the machine at the same time" in caveats_of(record, NOTHING_STATED)
        for record in records
    )
    assert sorted(one.place for record in records for one in record.rounds) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_trial_that_needs_more_than_a_lane_runs_alone_on_the_whole_machine(tmp_path):
    log = execute(tmp_path / "run", [wide(64, 2), wide(128, 4), wide(256, 2)], 2)
    assert sorted(log) == [(2, "0,1"), (2, "2,3"), (4, "")]
    assert {record.settings.cp_size: record.lanes for record in read_records(tmp_path / "run")} == {2: 2, 4: 1}


def test_lengths_of_one_search_run_one_after_another_also_with_lanes(tmp_path):
    seeds = [replace(trial(length), settings=replace(trial(length).settings, seed=seed))
             for seed in (0, 1) for length in (16, 32, 64)]  # fmt: skip
    met: list[int] = []
    log = execute(tmp_path / "run", seeds, 2, met, search=Search(until="oom"))
    assert len(log) == 6
    # Two met each time, in the order in which they came: one of each seed.
    assert [sorted(met[number : number + 2]) for number in (0, 2, 4)] == [[0, 1]] * 3


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0", "1", "2", "3"]), ("GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-a", "GPU-b", "GPU-c", "GPU-d"])],
)
def test_lanes_share_the_gpus_that_are_visible(visible, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    lanes = lanes_of(RunContext(machine=FOUR, launcher=Meeting(None, [], []), environment=environment, commit=""), 4)
    assert [lane.environment["CUDA_VISIBLE_DEVICES"] for lane in lanes] == expected
    assert {(lane.machine.gpu_count, lane.machine.cores, lane.lanes) for lane in lanes} == {(1, 2, 4)}


def test_more_lanes_than_gpus_or_cores_are_refused():
    host = RunContext(machine=FOUR, launcher=Meeting(None, [], []), environment={}, commit="")
    with pytest.raises(UsageError, match="--parallel 5: this machine has 4 GPUs; give at most that many lanes"):
        lanes_of(host, 5)
    cpu = Machine(hostname="here", device="cpu", cores=2, memory_gib=8.0)
    with pytest.raises(UsageError, match="--parallel 3: this machine has 2 cores"):
        lanes_of(replace(host, machine=cpu), 3)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores, to share them")
def test_two_trials_of_a_real_run_have_a_core_each(tmp_path):
    (tmp_path / "cores.py").write_text(
        "import os\nfrom engine.burst import Burst\n\n"
        "class Cores(Burst):\n    def attention(self, cp, settings):\n"
        "        print('cores', sorted(os.sched_getaffinity(0)), flush=True)\n"
        "        return super().attention(cp, settings)\n\nMETHOD = Cores()\n"
    )
    (tmp_path / "exp.yaml").write_text(
        "task: train\nmodel: tiny\nsweep: {seq_len: [64, 128]}\n"
        "fixed: {method: burst, cp_size: 1, dtype: fp32}\nsteps: {warmup: 1, measured: 2}\n"
    )
    program = (
        "import sys\nimport harness.run.attempt as attempt\nattempt.method_module = lambda _: 'cores'\n"
        "from harness.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "run", "exp.yaml", "--out", "out", "--parallel", "2"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{PROJECT}{os.pathsep}{tmp_path}"},
        capture_output=True, text=True, check=False, timeout=AMPLE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = [read_record(path) for path in tmp_path.glob("out/trials/*/record.json")]
    assert [(record.status, record.launcher, record.lanes) for record in records] == [("ok", "local", 2)] * 2
    assert {record.environment["OMP_NUM_THREADS"] for record in records} == {"1"}
    said = [
        line
        for log in tmp_path.glob("out/trials/*/logs/rank0.log")
        for line in log.read_text().splitlines()
        if line.startswith("cores")
    ]
    first, second, *_ = sorted(os.sched_getaffinity(0))
    share = len(os.sched_getaffinity(0)) // 2
    assert len(set(said)) == 2
    assert share > 1 or set(said) == {f"cores [{first}]", f"cores [{second}]"}
