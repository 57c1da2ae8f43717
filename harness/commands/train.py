"""`burst train`: train a model on real data; checkpoints, metrics, and resuming."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base.errors import UsageError
from harness.base.interrupts import interruptible
from harness.commands import (
    add_launch_arguments,
    check_launch_arguments,
    command_line,
    leave_at_once,
    machine_and_launcher,
)

if TYPE_CHECKING:
    from harness.run.bounds import StopTime
    from harness.training.file import TrainingFile


class TrainCommand:
    help = "train a model on real data; Ctrl-C saves first, and --resume continues"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="training configuration")
        parser.add_argument(
            "--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE",
            help="replace one value, such as save.every=100; may be repeated",
        )  # fmt: skip
        add_launch_arguments(parser, what="train")
        parser.add_argument(
            "--torchrun", action="store_true", help="this process is one rank, which torchrun started on each host"
        )
        parser.add_argument(
            "--out", type=Path, metavar="DIR", help="directory of the run (default: results/runs/<configuration>)"
        )
        parser.add_argument("--resume", action="store_true", help="continue from the newest whole checkpoint in DIR")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.base.terminal import stderr_console
        from harness.records.provenance import commit
        from harness.training.progress import TrainingView
        from harness.training.run import Start, interruption, stop_time, train

        _check_options(arguments)
        run_dir = arguments.out or Path("results", "runs", arguments.config.stem)
        if arguments.torchrun:
            from harness.training.torchrun import said_once, train_as_rank

            with said_once():
                file = _loaded(arguments)
                return train_as_rank(file, run_dir, resume=arguments.resume, again=command_line(arguments))
        file = _loaded(arguments)
        view = TrainingView(stderr_console(), file.config.steps)
        stop = stop_time(view.say, file.config.save.grace_seconds)
        machine, launcher = machine_and_launcher(arguments, view.say)
        with contextlib.closing(launcher):
            start = Start(
                machine=machine,
                launcher=launcher,
                run_dir=run_dir,
                resume=arguments.resume,
                commit=commit(),
                again=command_line(arguments),
                over_nodes=launcher.name == "ray",
            )
            with view, _announced(view.say, stop), stop.interrupting() if stop else contextlib.nullcontext():
                try:
                    code = train(file.config, start, view, view.say)
                except KeyboardInterrupt:
                    view.say(interruption(start))
                    code = 1
        if code == 0:
            print(f"Trained: {start.run_dir}")
        if getattr(launcher, "stuck", False):
            leave_at_once(code)
        return code


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises UsageError for options that contradict each other, and for torchrun's ranks that are not told so."""
    check_launch_arguments(arguments)
    if arguments.torchrun and (arguments.nodes or arguments.ray or arguments.launcher):
        raise UsageError("with --torchrun the ranks run already; leave --nodes, --ray and --launcher out")
    if not arguments.torchrun and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError("torchrun started this process, and burst train would start ranks of its own; add --torchrun")


def _loaded(arguments: argparse.Namespace) -> TrainingFile:
    """The configuration. Raises UsageError, also for a package that it needs and that is not installed."""
    from harness.training.file import load_training

    file = load_training(arguments.config, arguments.overrides)
    if file.config.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "metrics.tensorboard is true, but the tensorboard package is not installed; install it with: "
            "pip install 'burst-harness[train]', or set metrics.tensorboard to false"
        )
    return file


def _announced(say: Callable[[str], None], stop: StopTime | None) -> contextlib.AbstractContextManager[None]:
    """Within the block the first signal prints the next step. Each signal acts as Ctrl-C; a SIGUSR1 after the first
    signal does not: Slurm's and that of `stop` announce the same end, and the run is being saved."""
    said = False

    def announce(number: int) -> bool:
        nonlocal said
        if said:
            return number != signal.SIGUSR1
        said = True
        why = f" ahead of {stop.option}" if stop is not None and stop.passed else ""
        with contextlib.suppress(OSError):  # the terminal may be what is gone
            say(f"stopping{why}: the step under way is finished and saved; a second Ctrl-C or SIGTERM ends at once")
        return True

    return interruptible(announce)


COMMAND = TrainCommand()
