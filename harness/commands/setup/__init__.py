"""`burst setup`: what is made once for a machine: compared systems, its speeds, and the container image."""

from __future__ import annotations

from harness.commands import Command, Verbs
from harness.commands.setup.baselines import BaselinesCommand
from harness.commands.setup.calibrate import CalibrateCommand
from harness.commands.setup.image import ImageCommand

VERBS: dict[str, Command] = {
    "baselines": BaselinesCommand(),
    "calibrate": CalibrateCommand(),
    "image": ImageCommand(),
}
COMMAND = Verbs("install compared systems, measure this machine's speeds, build or send the container image", VERBS)
