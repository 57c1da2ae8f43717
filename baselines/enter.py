"""`python -m baselines.enter MODULE TRIAL_DIR`: become the engine's worker, run by a compared system's interpreter.

The launcher starts each rank of such a trial with it, and this process goes on as `engine.worker` in the environment
that `burst setup baselines install` made: the system's own packages and the torch it borrowed. Of this project that
interpreter sees the packages `engine` and `baselines` alone, through links. What was installed is handed on in a
variable, because the system's interpreter lacks what reads pins.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import baselines
import engine
from baselines.called import InWorker
from baselines.called_attention import ENTERED
from baselines.drive import ran, write_error
from baselines.install.places import InstallPlace
from baselines.upstream import Rendered, foreign_environment
from engine.reader import to_json

_LINKS = "ours"  # folder of an installation with links to our packages
_RECORDER = ("TORCH_NCCL_", "TORCH_FR_")  # torch's recorder of collectives, which the launcher asks at a limit


def main(words: Sequence[str]) -> int:
    """Does not return where the worker could be started."""
    if len(words) != 2:
        print("usage: python -m baselines.enter MODULE TRIAL_DIR", file=sys.stderr)
        return 2
    trial_dir, rank = Path(words[1]), int(os.environ.get("RANK", "0"))
    method: InWorker = importlib.import_module(words[0]).METHOD  # the system's adapter
    place = method.place
    if (reason := place.not_installed_reason(method.system)) is not None:  # on this host; the plan looked at another
        write_error(trial_dir, rank, "refused", reason)
        return 1
    become(worker_of(place, trial_dir), place, os.environ)


def worker_of(place: InstallPlace, trial_dir: Path) -> Rendered:
    """The engine's worker as the system's interpreter runs it, and the environment over the launcher's."""
    links = link_packages(place.folder / _LINKS)
    environment = place.environment
    path = os.pathsep.join(filter(None, (str(links), environment.get("PYTHONPATH", ""))))
    # -P: the directory that the rank starts in is no place for modules.
    command = (str(place.python), "-P", "-m", "engine.worker", str(trial_dir))
    started = Rendered(command=command, environment={**environment, "PYTHONPATH": path})
    entered = {"ran": to_json(ran(place, started, trial_dir)), "source": str(place.source)}
    return Rendered(command=command, environment={**started.environment, ENTERED: json.dumps(entered)})


def become(worker: Rendered, place: InstallPlace, given: Mapping[str, str]) -> NoReturn:
    """Go on as that program, in the environment of the launcher but for what leads Python to packages of ours."""
    recorder = {name: value for name, value in given.items() if name.startswith(_RECORDER)}
    environment = foreign_environment(given, {**recorder, **worker.environment}, [place.python.parent])
    sys.stdout.flush()
    os.execve(worker.command[0], worker.command, environment)  # noqa: S606 - an argument list; no shell takes part


def link_packages(folder: Path) -> Path:
    """The folder with links to `engine` and `baselines`; every rank makes those that are missing or lead elsewhere."""
    folder.mkdir(exist_ok=True)
    for package in (engine, baselines):
        target, link = Path(package.__path__[0]), folder / package.__name__
        if not link.exists() or not link.samefile(target):
            new = folder / f".{package.__name__}.{os.getpid()}"
            new.symlink_to(target)
            new.replace(link)
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
