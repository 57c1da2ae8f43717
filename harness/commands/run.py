"""`burst run`: plan, launch, record, report."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.files.errors import shown_value
from cluster.files.progress import Progress
from harness.base.errors import UsageError
from harness.base.interrupts import interrupted_once
from harness.commands import (
    add_launch_arguments,
    check_launch_arguments,
    command_line,
    leave_at_once,
    machine_and_launcher,
)
from harness.spec.experiment import add_experiment_arguments, chosen_experiment

if TYPE_CHECKING:
    from harness.machine.this_machine import Machine
    from harness.report.results import RunRecords
    from harness.spec.experiment import Experiment
    from harness.spec.trial import Trial


CPU_SCALE = "smoke"  # the scale of an experiment that CPUs run in seconds
PRINTED_TRIALS = 500  # lines of the table at the end; a terminal keeps few more


class RunCommand:
    help = "run all trials of an experiment, then report; after Ctrl-C, --resume continues"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        add_experiment_arguments(parser)
        add_run_arguments(parser)

    @interrupted_once()
    def run(self, arguments: argparse.Namespace) -> int:
        from harness.base.terminal import stderr_console
        from harness.plan.matrix import named, plan, unused_exclusions
        from harness.records.forecasts import records_with_plan
        from harness.records.provenance import changes, commit, redacted_command
        from harness.report.results import RunRecords
        from harness.run.attempt import RunContext
        from harness.run.bounds import Bounds, job_end, stop_time
        from harness.run.execution import ExecutionOptions, Resume, run_experiment
        from harness.run.progress import view_for
        from harness.spec.written import experiment_text

        check_launch_arguments(arguments)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise UsageError("torchrun started this process, and burst run starts the ranks itself; leave torchrun out")
        if arguments.again and (arguments.only or arguments.retry_failed):
            raise UsageError("--again runs the trials that it names and no others; leave --only and --retry-failed out")
        experiment = chosen_experiment(arguments)
        run_dir = arguments.out or Path("results", "runs", experiment.name)
        console = stderr_console()

        def say(message: str) -> None:
            console.print(message, markup=False, highlight=False, soft_wrap=True)

        stop = stop_time(arguments.stop_before, arguments.max_hours, allocation_end=job_end(say))
        bounds = Bounds(
            retries=arguments.retry, failures_in_a_row=arguments.max_failures, trials=arguments.limit, stop=stop
        )
        resume = None
        if any((arguments.resume, arguments.retry_failed, arguments.set_aside_bad, arguments.mix, arguments.again)):
            resume = Resume(
                retry_failed=arguments.retry_failed, set_aside_bad=arguments.set_aside_bad, mix=arguments.mix
            )
        records = RunRecords(run_dir)
        with contextlib.ExitStack() as closing:
            progress = closing.enter_context(Progress(f"planning the trials of {experiment.name}"))
            machine, launcher = machine_and_launcher(arguments, say)
            closing.callback(launcher.close)
            if stop is not None:
                closing.enter_context(stop.interrupting())
            shown = records_with_plan()
            trials = [
                dataclasses.replace(trial, profile=arguments.profile) for trial in plan(experiment, machine, shown)
            ]
            if arguments.scale is None and not arguments.overrides:
                for sentence in unused_exclusions(experiment):
                    say(sentence)
            if launcher.name == "local" and (note := _without_gpus(experiment, trials, machine)):
                say(note)
            search = experiment.search.until != "no"
            chosen = named(trials, arguments.only, search=search) if arguments.only else None
            if resume is not None and arguments.again:
                chosen = named(trials, arguments.again, "--again", search=search)
                resume = dataclasses.replace(resume, again=frozenset(trial.id for trial in chosen))
            typed = redacted_command(command_line(arguments))
            code_commit = commit()
            host = RunContext(
                machine=machine,
                launcher=launcher,
                commit=code_commit,
                changes=changes(code_commit),
                run_command=typed,
            )
            code = run_experiment(
                experiment.name,
                trials,
                host,
                run_dir,
                view=view_for(console, progress),
                say=say,
                options=ExecutionOptions(
                    rounds=experiment.rounds,
                    search=experiment.search,
                    bounds=bounds,
                    order=arguments.order,
                ),
                only=chosen,
                text=experiment_text(experiment, f"As resolved by: {shown_value(shlex.join(typed))}"),
                resume=resume,
                again=command_line(arguments),
                records=records,
                shown=shown,
            )
        try:
            with Progress(f"drawing the report of {run_dir}"):
                _report(records)
        except KeyboardInterrupt:
            drawing = shlex.join(["burst", "report", str(run_dir)])
            raise KeyboardInterrupt(
                f"interrupted while the report was drawn; all records are kept, and it is drawn by: {drawing}"
            ) from None
        if getattr(launcher, "stuck", False):
            leave_at_once(code)
        return code


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """How trials are run, whatever names the experiment."""
    add_launch_arguments(parser, what="run")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="directory of the run (default: results/runs/<experiment>)"
    )
    parser.add_argument(
        "--only", metavar="ID", action="append", default=[],
        help="run only the trials whose id is or begins with this, or matches a pattern such as 'train-*-cp4-*'; "
        "may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--again", metavar="ID", action="append", default=[],
        help="run these trials of the run in DIR once more, however they ended, beside the other records there, which "
        "stay as they are; names them as --only does",
    )  # fmt: skip
    parser.add_argument(
        "--order", choices=("random", "file", "shortest", "longest"), default="random",
        help="of the trials of each round: at random (default), as in the file, or by the model FLOPs of a rank",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=_count, default=0, metavar="N", help="run at most N trials; --resume runs the others"
    )
    parser.add_argument(
        "--max-hours", type=float, metavar="H",
        help="end the run after H hours at the latest, in a state that --resume continues",
    )  # fmt: skip
    parser.add_argument(
        "--stop-before", metavar="TIME",
        help="end the run before this time of the clock, such as 06:50 or 2026-12-24T06:50, in a state that "
        "--resume continues",
    )  # fmt: skip
    parser.add_argument(
        "--retry", type=_count, default=0, metavar="N",
        help="repeat a trial up to N times that hung or lost its host, on other hosts where there are some",
    )  # fmt: skip
    parser.add_argument(
        "--max-failures", type=_count, default=0, metavar="N", help="end the run after N failed trials in a row"
    )
    parser.add_argument("--resume", action="store_true", help="keep finished trials and rounds of the run in DIR")
    parser.add_argument(
        "--retry-failed", action="store_true",
        help="resume, and run again trials and rounds that failed, timed out, hung, lost their node or were wrong",
    )  # fmt: skip
    parser.add_argument(
        "--set-aside-bad", action="store_true",
        help="resume; records that cannot be used are renamed and their trials run again",
    )  # fmt: skip
    parser.add_argument(
        "--mix", action="store_true",
        help="resume beside records of another experiment, commit, GPU or driver, which is refused otherwise",
    )  # fmt: skip
    parser.add_argument(
        "--profile", action="store_true",
        help="trace a step of each trial: trials/<id>/trace.json.gz, and a table of its time",
    )  # fmt: skip


def _without_gpus(experiment: Experiment, trials: Sequence[Trial], machine: Machine) -> str | None:
    """One sentence where trials in bf16, the dtype of GPUs, are about to run on a CPU and the file has a scale for it;
    else None. Files for CPUs compute in fp32."""
    if machine.device != "cpu" or experiment.scale == CPU_SCALE or CPU_SCALE not in experiment.scales:
        return None
    if all(trial.settings.dtype != "bf16" for trial in trials):
        return None
    return (
        f"no GPU was found on this machine, so the ranks are CPU processes; {experiment.path} has a scale for CPUs: "
        f"--scale {CPU_SCALE}"
    )


def _report(records: RunRecords) -> None:
    """Print the table and the path of the report, on stdout because they are the command's result."""
    from harness.base.terminal import print_table, stdout_console
    from harness.report.tables.trials import terminal_table

    out, rows = stdout_console(), records.rows()
    print_table(out, terminal_table(rows[:PRINTED_TRIALS]))
    if len(rows) > PRINTED_TRIALS:
        said = f"The first {PRINTED_TRIALS} of {len(rows)} trials; results.csv and the report have all of them."
        out.print(said, markup=False, highlight=False, soft_wrap=True)
    from harness.report.page import write_report_of  # imports matplotlib: the table is not to wait for it

    path = write_report_of(records.records(), rows, records.stored.path)
    out.print(f"Report: {path}", markup=False, highlight=False, soft_wrap=True)


def _count(text: str) -> int:
    number = int(text) if text.isascii() and text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 up")
    return number


COMMAND = RunCommand()
