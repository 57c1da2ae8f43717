"""How long `burst plan`, `status`, `run --resume` and `report` take for many trials. Not a test:

    python -m tests.harness.measure_bookkeeping                    # 120, 1,000 and 10,000 finished trials

Nothing is run: the trials are those of a real sweep, and their records synthetic ones, all finished. So what is
measured is ours: planning, reading and writing.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from harness.machine.this_machine import discover
from harness.plan.matrix import plan
from harness.records.record import write_record
from harness.run.directory import RunDirectory
from harness.spec.experiment import load_experiment
from harness.spec.trial import Trial
from tests.harness import synthetic_records

ROOT = Path(__file__).parents[2]
EXPERIMENT = """\
title: Many small trials
task: attention
model: {{layers: 2, hidden: 128, ffn: 256, heads: 8, kv_heads: 8, head_dim: 16, vocab: 256}}
sweep: {{mask: [causal, full], seq_len: [1024, 2048, 4096, 8192, 16384], cp_size: [1, 2]}}
fixed: {{method: burst, dtype: fp32}}
steps: {{warmup: 0, measured: 3}}
seeds: [{seeds}]
"""
PER_SEED = 20


def finished_run(folder: Path, count: int) -> tuple[Path, Path]:
    """An experiment of about `count` trials, and the directory of its run, in which all are finished."""
    path, run_dir = folder / "many.yaml", folder / "run"
    path.write_text(EXPERIMENT.format(seeds=", ".join(map(str, range(-(-count // PER_SEED))))))
    trials = plan(load_experiment(path), discover())
    directory = RunDirectory(run_dir)
    for trial in trials:
        leave_record(directory, trial)
    directory.describe(experiment="many", title="", trials=[trial.id for trial in trials], started_at="2026-01-02")
    return path, run_dir


def leave_record(directory: RunDirectory, trial: Trial) -> None:
    """The record of a trial that ended well, and the files a worker leaves beside it."""
    settings = trial.settings
    record = replace(
        synthetic_records.record(),
        trial_id=trial.id,
        experiment=trial.experiment,
        settings=settings,
        measurement=synthetic_records.measurement(settings, seconds=0.001 * (1 + settings.seed % 7)),
    )
    write_record(directory.trial(trial.id), record)


def measured(arguments: list[str], folder: Path) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and peak GiB so far of one command."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, after.ru_maxrss / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="+", default=[120, 1000, 10_000], metavar="N")
    arguments = parser.parse_args()
    print("| trials | command | seconds | CPU seconds | GiB |\n|---|---|---|---|---|")
    for count in arguments.trials:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            experiment, run_dir = finished_run(folder, count)
            commands = {
                "plan": ["plan", str(experiment)],
                "status": ["status", str(run_dir)],
                "report": ["report", str(run_dir), "--out", str(folder / "report")],
                "run --resume": ["run", str(experiment), "--out", str(run_dir), "--resume", "--launcher", "local"],
            }
            for title, command in commands.items():
                wall, cpu, gib = measured(command, folder)
                print(f"| {count} | {title} | {wall:.1f} | {cpu:.1f} | {gib:.2f} |", flush=True)
            page = (folder / "report" / "report.html").stat().st_size
            print(f"\nreport.html of {count} trials has {page / (1 << 20):.1f} MiB.\n", flush=True)


if __name__ == "__main__":
    main()
