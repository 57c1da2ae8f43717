"""`burst train`: train a model on real data; checkpoints, metrics, and resuming."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from harness.base.errors import UsageError
from harness.base.interrupts import interruptible
from harness.commands import command_line
from harness.launch.launcher import LAUNCHERS, default_launcher, make_launcher


class Train:
    help = "train a model on real data; Ctrl-C saves first, and --resume continues"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("config", type=Path, metavar="CONFIG.yaml", help="training configuration")
        parser.add_argument(
            "--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE",
            help="replace one value, such as save.every=100; may be repeated",
        )  # fmt: skip
        parser.add_argument("--launcher", choices=LAUNCHERS, help="default: ray where it is installed, else local")
        parser.add_argument(
            "--out", type=Path, metavar="DIR", help="directory of the run (default: results/runs/<configuration>)"
        )
        parser.add_argument("--resume", action="store_true", help="continue from the newest whole checkpoint in DIR")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.base.terminal import stderr_console
        from harness.machine.this_machine import discover
        from harness.records.provenance import commit
        from harness.training.file import load_training
        from harness.training.progress import TrainingView
        from harness.training.run import Start, interruption, train

        file = load_training(arguments.config, arguments.overrides)
        _check_packages(file.config.metrics.tensorboard)
        with contextlib.closing(make_launcher(arguments.launcher or default_launcher())) as launcher:
            start = Start(
                machine=discover(),
                launcher=launcher,
                run_dir=arguments.out or Path("results", "runs", arguments.config.stem),
                resume=arguments.resume,
                commit=commit(),
                again=command_line(arguments),
            )
            with TrainingView(stderr_console(), file.config.steps) as view, _announced(view.say):
                try:
                    code = train(file.config, start, view, view.say)
                except KeyboardInterrupt:
                    view.say(interruption(start))
                    return 1
        if code == 0:
            print(f"Trained: {start.run_dir}")
        return code


def _check_packages(tensorboard: bool) -> None:
    if tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "metrics.tensorboard is true, but the tensorboard package is not installed; install it with: "
            "pip install 'burst-harness[train]', or set metrics.tensorboard to false"
        )


def _announced(say: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
    """Within the block the first signal prints the next step; each signal acts as Ctrl-C."""
    said = False

    def announce(_: int) -> bool:
        nonlocal said
        if not said:
            said = True
            with contextlib.suppress(OSError):  # the terminal may be what is gone
                say("stopping: the step under way is finished and saved; a second signal ends at once")
        return True

    return interruptible(announce)


COMMAND = Train()
