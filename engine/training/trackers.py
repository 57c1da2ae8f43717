"""Where the figures of a training run go beside metrics.jsonl: event files of TensorBoard, Weights & Biases or Trackio.

Each tracker is a package that is imported only where it is configured. It gets the figures and the configuration of the
run: no environment, no console output, no measurements of the machine.
"""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from engine.atomic import write_atomic

if TYPE_CHECKING:
    from engine.training.config import TrainingConfig

TrackerName = Literal["none", "tensorboard", "wandb", "trackio"]
# The extra of pyproject.toml that brings a tracker's package. The package has the tracker's name.
EXTRAS = {"tensorboard": "train", "wandb": "wandb", "trackio": "trackio"}
ID_FILE = "tracker_id"
_STEP = "step/number"  # the axis of Weights & Biases: its own counter cannot go back to a step that is done again


class Tracker(Protocol):
    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Figures by name, such as `step/loss`, after that step."""
        ...

    def flush(self) -> None:
        """Write what is only in memory to disk, before a checkpoint that the run may resume from."""
        ...

    def close(self) -> None:
        """Once, at the end of the run."""
        ...


def tensorboard_directory(run: Path) -> Path:
    return run / "tensorboard"


def open_tracker(run: Path, config: TrainingConfig, *, from_step: int) -> Tracker | None:
    """The configured tracker of the run in folder `run`, which goes on after `from_step`; None where none is.

    Raises ValueError where its package is not installed, or cannot start.
    """
    name = config.metrics.tracker
    if name == "none":
        return None
    try:
        if name == "tensorboard":
            return _TensorBoard(run, from_step)
        return (_WeightsAndBiases if name == "wandb" else _Trackio)(run, config)
    except ImportError as error:
        raise ValueError(missing_package(name, f"cannot be imported here ({error})")) from error


def missing_package(name: str, found: str) -> str:
    """The sentence for a tracker whose package was `found` so."""
    return (
        f"metrics.tracker is {name}, and the {name} package {found}; install it with: "
        f"pip install 'burst-harness[{EXTRAS[name]}]', or set metrics.tracker to none"
    )


class _TensorBoard:
    """Event files. Steps after `from_step` of earlier starts are hidden."""

    def __init__(self, run: Path, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events: Any = SummaryWriter(str(tensorboard_directory(run)), purge_step=from_step + 1)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._events.add_scalar(name, value, global_step=step)

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


class _WeightsAndBiases:
    """One run of Weights & Biases for all starts. Files are below RUN/wandb; WANDB_MODE=offline sends nothing."""

    def __init__(self, run: Path, config: TrainingConfig) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        quiet = self._wandb.Settings(
            console="off", silent=True, x_disable_meta=True, x_disable_stats=True, x_save_requirements=False
        )
        try:
            self._run = self._wandb.init(
                project=_project("WANDB_PROJECT"), dir=str(run), id=_id(run), name=run.resolve().name, resume="allow",
                config=asdict(config), settings=quiet,
            )  # fmt: skip
        except (OSError, self._wandb.Error) as error:
            raise ValueError(
                f"metrics.tracker is wandb, which could not start ({error}); "
                "run `wandb login`, set WANDB_MODE=offline, or set metrics.tracker to none"
            ) from error
        self._run.define_metric("*", step_metric=_STEP)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log({**figures, _STEP: step})

    def flush(self) -> None:
        """Its own process writes each line as it comes."""

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # ends that process: ranks leave without exit handlers


class _Trackio:
    """One run of Trackio for all starts, in the database of this user (TRACKIO_DIR), which `trackio show` reads."""

    def __init__(self, run: Path, config: TrainingConfig) -> None:
        trackio: Any = importlib.import_module("trackio")
        self._run = trackio.init(
            project=_project("TRACKIO_PROJECT"), name=f"{run.resolve().name}-{_id(run)}", resume="allow",
            config=asdict(config), embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, figures: Mapping[str, float], step: int) -> None:
        self._run.log(dict(figures), step=step)

    def flush(self) -> None:
        """Its own thread writes the lines within a second."""

    def close(self) -> None:
        self._run.finish()


def _project(variable: str) -> str:
    return os.environ.get(variable) or "burst"


def _id(run: Path) -> str:
    """The name of this run among all others of a tracker; kept in its folder, so that a resumed run goes on in it."""
    path = run / ID_FILE
    if not path.exists():
        write_atomic(path, secrets.token_hex(4))
    return path.read_text(encoding="utf-8")
