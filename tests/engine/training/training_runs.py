"""Small training runs on the ranks that are there, for the tests beside this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from engine.burst import METHOD
from engine.distributed import arrange
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from engine.training.config import Evaluation, Order, Saving, Schedule, TrainingConfig
from engine.training.files import read_metrics
from engine.training.loop import StopRequest, TrainingRun

# 257 rows of the embedding do not divide by 2 or 4, so ranks hold shards of different sizes.
SHAPE = ModelShape(name="odd", layers=2, hidden=12, ffn=20, heads=2, kv_heads=1, head_dim=6, vocab=257)


def config(**changes: Any) -> TrainingConfig:
    """Six steps of two sequences; `changes` are fields of the configuration or of its settings."""
    settings = {
        "task": "train", "method": "burst", "model": SHAPE, "seq_len": 32, "batch_size": 2, "dtype": "fp32",
        "learning_rate": 0.01, "checkpoint": Checkpoint(every=0),
    }  # fmt: skip
    own = {"steps": 6, "lr_schedule": Schedule(warmup=2), "save": Saving(every=2), "evaluate": Evaluation(every=3)}
    for name, value in changes.items():
        (settings if name in TrialSettings.__dataclass_fields__ and name != "steps" else own)[name] = value
    return TrainingConfig(settings=TrialSettings(**settings), **own)


def order(config: TrainingConfig, *, resume: bool = False) -> Order:
    return Order(config=config, method="engine.burst", resume=resume, model_flops_per_step=1e9, peak_tflops=None)


def begin(run: Path, order: Order) -> TrainingRun:
    world = arrange(order.config.settings, torch.device("cpu"))
    return TrainingRun(order, METHOD, world, run, StopRequest())


def go_on(run: Path, order: Order, stop_after: int | None = None) -> dict[str, Any]:
    """One start of a run, asked to stop during step `stop_after`; what it left, or the sentence it ended with."""
    try:
        training = begin(run, order)
    except ValueError as error:
        return {"refused": str(error)}
    lines: list[dict[str, Any]] = []

    def on_progress(line: dict[str, Any]) -> None:
        lines.append(line)
        if "loss" in line and line["step"] + 1 == stop_after and training.world.rank == 0:
            training._stop.asked = True  # of one rank; all are to follow

    finished = training.run(on_progress)
    training.world.barrier()
    return {
        "finished": finished,
        "steps_done": training.steps_done,
        "notes": training.notes,
        "progress": lines,
        "metrics": read_metrics(run),
        "parameters": {name: whole(value) for name, value in training.task.model.named_parameters()},
    }


def whole(value: torch.Tensor) -> list[float]:
    return (value.full_tensor() if isinstance(value, DTensor) else value).flatten().tolist()


def several(starts: list[tuple[str, Order, int | None]]) -> list[dict[str, Any]]:
    """Several starts, one after the other, on the same ranks."""
    return [go_on(Path(run), order, stop_after) for run, order, stop_after in starts]


def curve(result: dict[str, Any], kind: str = "step") -> list[tuple]:
    """(step, tokens, loss, ...) of every line of a kind, without what the clock and the machine decide."""
    measured = ("step", "tokens", "loss", "grad_norm", "learning_rate")
    return [tuple(line.get(key) for key in measured) for line in result["metrics"] if line["kind"] == kind]
