"""Jobs of a real small Slurm on two hosts of the lab: `ray symmetric-run` and `burst run --ray auto`, to the report.

Submitted is the example that docs/cluster.md shows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.hosts import slurm as slurm_module
from tests.hosts.slurm import Slurm, open_slurm
from tests.patience import AMPLE, wait_until
from tests.processes import command_of

pytestmark = pytest.mark.hosts

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = "experiments/sites/slurm.sbatch"
# Each host has one GPU as far as Slurm knows; the ranks run on the CPU.
REQUEST = ("--nodes=2", "--gpus-per-node=1")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

EXPERIMENT = """
title: Attention over the nodes of a job
task: attention
model: tiny
sweep: {{cp_size: [2]}}
fixed: {{method: burst, seq_len: 256, dtype: fp32}}
steps: {{warmup: 1, measured: {steps}}}
seeds: [{seeds}]
"""


class Site:
    """The Slurm of the tests, and what jobs leave in the lab's folder."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm
        self.folder = slurm.lab.folder

    def submit(self, name: str, *arguments: str, run: str = "") -> str:
        """Submit a job whose output is `name`.out; its number."""
        return self.slurm.submit(
            f"--output={self.folder}/{name}.out",
            f"--chdir={ROOT}",
            *arguments,
            environment={
                "PYTHON": sys.executable,
                "PYTHONPATH": str(ROOT),
                "XDG_STATE_HOME": str(self.folder / "state"),
                "COLUMNS": "200",
                "RUN": str(self.folder / run),
            },
        )

    def sweep(self, run: str, steps: int, seeds: str, *options: str) -> str:
        """Submit the example with an experiment, or again for what is left of its run; the job's number."""
        file = self.folder / f"{run}.yaml"
        file.write_text(EXPERIMENT.format(steps=steps, seeds=seeds))
        return self.submit(run, *REQUEST, *options, str(ROOT / EXAMPLE), str(file), run=run)

    def output(self, name: str) -> str:
        path = self.folder / f"{name}.out"
        return path.read_text() if path.exists() else ""

    def ended(self, job: str, name: str) -> str:
        """Wait for the job's end; its state. Nothing that it started is left then."""
        state = self.slurm.wait_for(job, *ENDED)
        assert "Traceback" not in self.output(name), self.output(name)
        wait_until(lambda: self.programs() == [], lambda: f"{name} left {self.programs()}")
        return state

    def programs(self) -> list[str]:
        """Programs of jobs that run on the hosts."""
        found = []
        for host in self.slurm.lab.hosts:
            for pid in self.slurm.lab.processes(host):
                line = command_of(pid)
                if any(word in line for word in ("ray", "harness", "srun", "sleep")):
                    found.append(f"{host.name}: {line[:120]}")
        return found

    def records(self, run: str) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted((self.folder / run).glob("trials/*/record.json"))]

    def measuring(self, run: str) -> bool:
        """Whether a trial that has no record, or none any more, has measured steps."""
        files = (self.folder / run).glob("trials/*/progress.jsonl")
        return any(file.stat().st_size > 200 for file in files if not file.with_name("record.json").exists())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if reason := slurm_module.unavailable():
        pytest.skip(reason)
    with open_slurm(2, tmp_path_factory.mktemp("slurm")) as slurm:
        yield Site(slurm)


def test_each_task_of_an_array_knows_its_own_end(site):
    """The number of the last task is also the array's, for which squeue lists all tasks."""
    script = site.folder / "array.sh"
    program = "from harness.run.bounds import job_end; print(job_end(print).isoformat())"
    script.write_text(f'#!/bin/sh\nexec "$PYTHON" -c "{program}"\n')
    output = f"--output={site.folder}/array%a.out"
    job = site.submit("array", output, "--array=0-1", "--nodes=1", "--time=30", str(script))
    for task in (0, 1):
        name = f"array{task}"
        wait_until(lambda name=name: site.output(name).endswith("\n"), lambda name=name: site.output(name), AMPLE / 2)
        started = datetime.fromisoformat(site.slurm.fact(f"{job}_{task}", "StartTime")).astimezone()
        assert datetime.fromisoformat(site.output(name).strip()) == started + timedelta(minutes=30)


def test_a_submitted_sweep_runs_over_both_nodes_of_its_job(site):
    job = site.sweep("whole", 2, "0")
    assert site.ended(job, "whole") == "COMPLETED", site.output("whole")
    (record,) = site.records("whole")
    assert (record["status"], record["hosts"], record["launcher"]) == ("ok", ["lab1", "lab2"], "ray")
    assert (site.folder / "whole" / "report.html").stat().st_size > 1000


def test_a_run_that_slurm_requeues_goes_on(site):
    job = site.sweep("broken", 500, "0, 1")
    wait_until(lambda: site.measuring("broken"), lambda: f"nothing measured: {site.output('broken')}", AMPLE / 2)
    site.slurm.run("scontrol", "requeue", job)
    assert site.ended(job, "broken") == "COMPLETED", site.output("broken")
    assert site.slurm.fact(job, "Restarts") == "1"
    assert [record["status"] for record in site.records("broken")] == ["ok", "ok"]


def test_a_run_ends_in_order_before_its_jobs_time_is_over(site):
    job = site.sweep("limited", 1_000_000, "0, 1", "--time=4")
    assert site.ended(job, "limited") == "FAILED", site.output("limited")  # and not TIMEOUT
    assert "stopped by the end of Slurm's job at " in site.output("limited")
    assert "--resume" in site.output("limited")
    assert {record["status"] for record in site.records("limited")} <= {"interrupted"}
    assert (site.folder / "limited" / "report.html").exists()


def test_a_node_that_fails_costs_the_trials_that_need_it_and_not_the_job(site):
    job = site.sweep("lost", 1_000_000, "0, 1", "--time=60")
    wait_until(lambda: site.measuring("lost"), lambda: f"nothing measured: {site.output('lost')}", AMPLE / 2)
    site.slurm.run("scontrol", "update", "NodeName=lab2", "State=DOWN", "Reason=test")  # as for a node that is silent
    assert site.ended(job, "lost") == "FAILED", site.output("lost")  # and not NODE_FAIL
    assert {record["status"] for record in site.records("lost")} == {"node_lost"}
    assert "lab2 was lost" in site.output("lost")
    assert "2 hosts are needed but 1 can be used now" in site.output("lost")
    assert (site.folder / "lost" / "report.html").exists()
