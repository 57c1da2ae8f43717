"""Jobs of a real small Slurm on two hosts of the lab: `burst run --nodes slurm` from submission to report.

Submitted is the example that docs/cluster.md shows.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests import slurm as slurm_module
from tests.cluster.test_lab_training import CONFIG, losses, saved
from tests.patience import AMPLE, wait_until
from tests.processes import command_of
from tests.slurm import Slurm, open_slurm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
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

# Runs as a job: what a connection to the job's second node does, as one JSON object.
CONNECTION = """
import dataclasses, json, os, sys
from pathlib import Path
from cluster.inventory.allocation import allocated_hosts
from cluster.transport.reach import connection
from cluster.transport.runner import Unreachable
from cluster.transport.slurm.limit import job_end
from cluster.transport.transfer import put

hosts, folder, found, lines = allocated_hosts(), Path(sys.argv[1]), {}, []
connect = connection(hosts)
with connect(hosts[1], 60) as runner:
    run = lambda *words, seconds=60, **more: dataclasses.asdict(runner.run(words, deadline_seconds=seconds, **more))
    found["name"] = run("hostname")["stdout"]
    found["words"] = run("printf", "%s|", "a b", "$HOME", "'q'", "", "*", "--nodes=9")["stdout"]
    found["streams"] = run("sh", "-c", "cat; echo bad >&2; exit 3", stdin="in \\u00e9\\n")
    found["late"] = run("sh", "-c", "echo early; exec sleep 600", seconds=5)
    found["gpus"] = run("printenv", "CUDA_VISIBLE_DEVICES")["stdout"]
    found["status"] = runner.stream(["sh", "-c", "echo one; echo two; exit 5"], lines.append, deadline_seconds=60)
    found["lines"] = lines
    content = os.urandom(3_000_000)
    put(runner, content, str(folder / "sent"), deadline_seconds=120)
    found["arrived"] = (folder / "sent").read_bytes() == content
    run("sh", "-c", "setsid sleep 601 > /dev/null 2>&1 & echo $! > " + str(folder / "left"))
    found["left"] = run("cat", "/proc/" + (folder / "left").read_text().strip() + "/cmdline")["stdout"]
for name, wrong in (("job", {"slurm_job": "999"}), ("node", {"name": "absent"})):
    try:
        with connect(dataclasses.replace(hosts[1], **wrong), 60) as runner:
            runner.run(["true"], deadline_seconds=60)
    except Unreachable as error:
        found[name] = str(error)
found["hosts"] = [[host.name, host.ranks] for host in hosts]
found["end"] = job_end(print).timestamp()
found["number"] = hosts[0].slurm_job
print(json.dumps(found))
"""


class Site:
    """The Slurm of the tests, and what jobs leave in the lab's folder."""

    def __init__(self, slurm: Slurm) -> None:
        self.slurm = slurm
        self.folder = slurm.lab.folder

    def close(self) -> None:
        """Remove what Ray left in /tmp where Slurm ended it."""
        for state in self.folder.glob("state/burst/slurm/*/cluster.json"):
            for node in json.loads(state.read_text())["nodes"]:
                shutil.rmtree(node["directory"], ignore_errors=True)

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

    def train(self, run: str, *more: str, options: tuple[str, ...] = ()) -> str:
        """Submit a training run that would go on for hours over both nodes, with these arguments; the job's number."""
        text, file, script = (self.folder / name for name in ("text.txt", "train.yaml", "train.sh"))
        text.write_text("a line of text to learn from\n" * 400)
        file.write_text(CONFIG.format(data=text))
        script.write_text('#!/bin/bash\nexec "$PYTHON" -m harness train "$1" --out "$RUN" --nodes slurm "${@:2}"\n')
        return self.submit(run, *REQUEST, *options, str(script), str(file), *more, run=run)

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
        site = Site(slurm)
        yield site
        site.close()


@pytest.mark.parametrize("place", ["a node of the job", "the shell of salloc"])
def test_commands_and_files_reach_a_node_by_steps_of_the_job(site, place):
    program = site.folder / "connection.py"
    program.write_text(CONNECTION)
    request = (*REQUEST, "--time=30")
    if place == "a node of the job":
        script = site.folder / "connection.sh"
        script.write_text(f'#!/bin/sh\nexec "$PYTHON" {program} {site.folder}\n')
        job = site.submit("connection", *request, str(script))
        assert site.ended(job, "connection") == "COMPLETED", site.output("connection")
        found = json.loads(site.output("connection"))
    else:
        found = json.loads(site.slurm.allocate(*request, sys.executable, str(program), str(site.folder)))
        job = found["number"]
    assert found["hosts"] == [["lab1", 1], ["lab2", 1]]
    assert found["name"] == "lab2\n"
    assert found["words"] == "a b|$HOME|'q'||*|--nodes=9|"
    assert found["streams"] == {"stdout": "in é\n", "stderr": "bad\n", "exit_status": 3}
    assert (found["late"]["stdout"], found["late"]["exit_status"]) == ("early\n", None)
    assert found["gpus"] == "0\n"
    assert (found["status"], found["lines"]) == (5, ["one", "two"])
    assert found["arrived"]
    assert found["left"] == "sleep\x00601\x00"
    assert "lab2 in job 999 (Unable to confirm allocation for job 999: Invalid job id specified)" in found["job"]
    assert found["node"].startswith(f"srun cannot run a step on absent in job {job} (")
    started = datetime.fromisoformat(site.slurm.fact(job, "StartTime"))
    assert found["end"] == (started + timedelta(minutes=30)).timestamp()


def test_each_task_of_an_array_knows_its_own_end(site):
    """The number of the last task is also the array's, for which squeue lists all tasks."""
    script = site.folder / "array.sh"
    program = "from cluster.transport.slurm.limit import job_end; print(job_end(print).isoformat())"
    script.write_text(f'#!/bin/sh\nexec "$PYTHON" -c "{program}"\n')
    output = f"--output={site.folder}/array%a.out"
    job = site.submit("array", output, "--array=0-1", "--nodes=1", "--time=30", str(script))
    for task in (0, 1):
        name = f"array{task}"
        wait_until(lambda name=name: site.output(name).endswith("\n"), lambda name=name: site.output(name), AMPLE / 2)
        started = datetime.fromisoformat(site.slurm.fact(f"{job}_{task}", "StartTime")).astimezone()
        assert datetime.fromisoformat(site.output(name).strip()) == started + timedelta(minutes=30)


def test_programs_that_take_nodes_take_those_of_the_job(site):
    script = site.folder / "programs.sh"
    script.write_text(
        '#!/bin/sh\n"$PYTHON" -m harness nodes slurm lab2 --names\n'
        '"$PYTHON" -m harness check slurm --only memlock --no-history --json\n'
        f'"$PYTHON" -m harness plan {ROOT}/experiments/quickstart.yaml --nodes slurm\n'
    )
    job = site.submit("programs", *REQUEST, str(script))
    assert site.ended(job, "programs") == "COMPLETED", site.output("programs")
    first, *others = site.output("programs").splitlines()
    assert first == "lab2"
    assert [json.loads(line)["node"] for line in others if line.startswith("{")] == ["lab1", "lab2"]
    assert others[-1].endswith("can run on the nodes (2 x 1 ranks)")


def test_a_cluster_that_is_started_in_a_job_serves_its_runs_until_it_is_ended(site):
    file = site.folder / "kept.yaml"
    file.write_text(EXPERIMENT.format(steps=2, seeds="0"))
    burst = '"$PYTHON" -m harness'
    script = site.folder / "kept.sh"
    script.write_text(
        f"#!/bin/sh -e\n{burst} cluster up slurm\n{burst} cluster status\nsqueue --steps --noheader --format=step%j\n"
        f'{burst} run {file} --nodes slurm --out "$RUN"\n{burst} cluster down\n'
    )
    job = site.submit("kept", *REQUEST, str(script), run="kept")
    assert site.ended(job, "kept") == "COMPLETED", site.output("kept")
    said = site.output("kept")
    assert "2 nodes are up with room for 2 ranks, head lab1" in said
    assert said.count("stepburst") == 2  # one for Ray on each node
    assert "no cluster is up" not in said
    assert [(record["status"], record["hosts"]) for record in site.records("kept")] == [("ok", ["lab1", "lab2"])]
    assert said.endswith("2 nodes ended; no process or file of burst is left on them\n")


def test_a_submitted_sweep_runs_over_both_nodes_of_its_job(site):
    job = site.sweep("whole", 2, "0")
    assert site.ended(job, "whole") == "COMPLETED", site.output("whole")
    (record,) = site.records("whole")
    assert (record["status"], record["hosts"], record["launcher"]) == ("ok", ["lab1", "lab2"], "ray")
    assert (site.folder / "whole" / "report.html").stat().st_size > 1000
    state = site.folder / "state" / "burst" / "slurm" / f"{job}.0"
    assert [path.name for path in state.iterdir()] == [".lock"]  # its cluster was ended


def test_a_run_that_slurm_interrupts_goes_on_when_it_is_submitted_or_requeued(site):
    job = site.sweep("broken", 500, "0, 1")
    wait_until(lambda: site.measuring("broken"), lambda: f"nothing measured: {site.output('broken')}", AMPLE / 2)
    site.slurm.run("scancel", "--signal=USR1", "--batch", job)  # as --signal=B:USR1 does it
    assert site.ended(job, "broken") == "FAILED", site.output("broken")
    assert "interrupted after 0 of 2 trials" in site.output("broken")
    (first,) = site.records("broken")
    assert first["status"] == "interrupted"

    job = site.sweep("broken", 500, "0, 1")
    wait_until(lambda: site.measuring("broken"), lambda: f"nothing measured again: {site.output('broken')}", AMPLE / 2)
    site.slurm.run("scontrol", "requeue", job)
    assert site.ended(job, "broken") == "COMPLETED", site.output("broken")
    assert site.slurm.fact(job, "Restarts") == "1"
    assert [record["status"] for record in site.records("broken")] == ["ok", "ok"]


def test_a_run_ends_in_order_before_its_jobs_time_is_over(site):
    job = site.sweep("limited", 1_000_000, "0, 1", "--time=2", "--signal=B:CONT@1")
    assert site.ended(job, "limited") == "FAILED", site.output("limited")  # and not TIMEOUT
    assert "stopped by the end of Slurm's job at " in site.output("limited")
    assert "--resume" in site.output("limited")
    assert {record["status"] for record in site.records("limited")} <= {"interrupted"}
    assert (site.folder / "limited" / "report.html").exists()


def test_a_training_run_over_the_nodes_of_a_job_saves_when_slurm_signals_and_goes_on(site):
    seen = 0
    for more in ([], ["--resume"]):
        job = site.train("trained", *more)
        wait_until(lambda seen=seen: saved(site.folder / "trained") > seen, lambda: site.output("trained"), AMPLE / 2)
        site.slurm.run("scancel", "--signal=USR1", "--batch", job)
        assert site.ended(job, "trained") == "FAILED", site.output("trained")
        assert "go on with: " in site.output("trained")
        steps = losses(site.folder / "trained")
        seen = saved(site.folder / "trained")
        assert list(steps) == list(range(1, seen + 1))  # the last step was saved, and none was lost or repeated


def test_a_training_run_saves_before_its_jobs_time_is_over(site):
    job = site.train("timed", options=("--time=2", "--signal=B:CONT@1"))
    assert site.ended(job, "timed") == "FAILED", site.output("timed")  # and not TIMEOUT
    assert "the end of Slurm's job at " in site.output("timed")
    assert "go on with: " in site.output("timed")
    assert list(losses(site.folder / "timed")) == list(range(1, saved(site.folder / "timed") + 1))


def test_a_node_that_fails_costs_the_trials_that_need_it_and_not_the_job(site):
    job = site.sweep("lost", 1_000_000, "0, 1", "--time=60")
    wait_until(lambda: site.measuring("lost"), lambda: f"nothing measured: {site.output('lost')}", AMPLE / 2)
    site.slurm.run("scontrol", "update", "NodeName=lab2", "State=DOWN", "Reason=test")  # as for a node that is silent
    assert site.ended(job, "lost") == "FAILED", site.output("lost")  # and not NODE_FAIL
    assert {record["status"] for record in site.records("lost")} == {"node_lost"}
    assert "lab2 was lost" in site.output("lost")
    assert "2 hosts are needed but 1 of 2 can be used" in site.output("lost")
    assert (site.folder / "lost" / "report.html").exists()
