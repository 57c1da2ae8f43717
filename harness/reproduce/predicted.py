"""What a predictor gives for the trials of a figure: times of the simulated schedule, and memory as the system holds it
whose settings a trial has as published, otherwise the engine's.

Another predictor takes its place by setting PREDICTOR: a name and one function from settings and hardware.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from baselines.paper_cluster import GPUS_PER_NODE
from engine.settings import TrialSettings
from harness.metrics.flops import counted_flops, tokens_per_step, work_of
from harness.metrics.hardware import Hardware, assumed, hardware_named, speeds_of
from harness.metrics.throughput import GIB
from harness.plan.forecast import forecast, machine_of
from harness.plan.matrix import plan
from harness.plan.predict import Prediction
from harness.predict.published_memory import system_of_row
from harness.predict.published_rows import RowSaysTooLittle, configuration_of_row
from harness.predict.systems import system_memory
from harness.predict.validation import HARDWARE, predicted_time
from harness.reproduce.figure_points import FigurePoint, gpu_text, predicted_entry, published_points
from harness.reproduce.figures import PaperFigure
from harness.spec.experiment import load_experiment
from harness.spec.trial import Trial

PAPER_HARDWARE, PAPER_SCALE = "a800", "paper"
SHORT = {
    "tokens_per_gpu_per_second": "speeds",
    "peak_memory_gib": "memory",
    "tflops_per_gpu": "TFLOP/s",
    "forward_backward_ms": "times",
}


class Predictor(Protocol):
    """Time and memory of a trial on given GPUs; None where it predicts nothing."""

    name: str  # what a figure calls its values

    def predict(self, settings: TrialSettings, hardware: Hardware) -> Prediction: ...


class SimulationPredictor:
    """The times and the memory of docs/plan.md."""

    name = "the schedule simulated; memory as published systems hold it, where their software was fitted, or the engine"

    def predict(self, settings: TrialSettings, hardware: Hardware) -> Prediction:
        found = forecast(settings, hardware)
        gib = found.gpu_gib
        if settings.settings == "as_published" and found.system_gib is not None:
            gib = found.system_gib
        seconds = found.time.seconds if found.time else None
        return Prediction(seconds=seconds, gpu_gib=gib, reserved_gib=None, host_gib=None)


PREDICTOR: Predictor = SimulationPredictor()


def trials_of(figure: PaperFigure, scale: str, hardware: Hardware) -> list[Trial]:
    """The trials of a scale on nodes of eight such GPUs. Raises UsageError for a scale that the file has not."""
    hardware = replace(hardware, gpus_per_node=GPUS_PER_NODE)
    return list(plan(load_experiment(figure.experiment, scale), machine_of(hardware), hardware=hardware))


def predicted_entries(
    figure: PaperFigure, scale: str, hardware: Hardware, predictor: Predictor | None = None
) -> list[FigurePoint]:
    """A point for each trial of the scale that can run and of which something is predicted that the figure shows."""
    predictor, hardware = predictor or PREDICTOR, replace(hardware, gpus_per_node=GPUS_PER_NODE)
    entries = []
    for trial in trials_of(figure, scale, hardware):
        if trial.unsupported_reason is None and (
            values := _values(figure, trial.settings, predictor.predict(trial.settings, hardware))
        ):
            entries.append(predicted_entry(figure, trial.settings, hardware.title, values))
    return entries


def predicted_for_paper(figure: PaperFigure) -> list[FigurePoint]:
    """What is drawn beside the published points: of each with a number its own set-up, as results/paper/predicted.csv
    has it, and trials of the figure's scale `paper`. Of trials with settings as published those are left out that a
    published set-up stands for already."""
    rows = list(_of_published_points(figure))
    known = {(entry.series, entry.setup) for entry in rows}
    trials = predicted_entries(figure, PAPER_SCALE, hardware_named(PAPER_HARDWARE))
    return rows + [one for one in trials if one.settings == "equal" or (one.series, one.setup) not in known]


def _of_published_points(figure: PaperFigure) -> Iterator[FigurePoint]:
    """The simulated time of each published point whose source says enough, and the memory of its system."""
    for point, row in published_points(figure):
        if not point.values or row.gpu_model not in HARDWARE:
            continue
        try:
            configuration = configuration_of_row(row.cells)
        except RowSaysTooLittle:
            continue
        settings, hardware = configuration.settings, hardware_named(HARDWARE[row.gpu_model])
        gib = None
        if hardware.waiting_layers is not None and settings.task == "train":
            system = system_of_row(row.method, True)
            gib = system_memory(settings, system, configuration.attention, hardware.waiting_layers) / GIB
        seconds = predicted_time(configuration, speeds_of(hardware)).seconds
        found = Prediction(seconds=seconds, gpu_gib=gib, reserved_gib=None, host_gib=None)
        if values := _values(figure, settings, found):
            yield replace(
                point, origin="predicted", hardware=hardware.title, values=values, status="ok", note=""
            )  # fmt: skip


def _values(figure: PaperFigure, settings: TrialSettings, found: Prediction) -> dict[str, float]:
    values = {}
    if found.seconds:
        gpu_seconds = found.seconds * settings.world_size
        values = {
            "tokens_per_gpu_per_second": tokens_per_step(settings) / gpu_seconds,
            "tflops_per_gpu": counted_flops(settings, work_of(settings)) / gpu_seconds / 1e12,
            "forward_backward_ms": found.seconds * 1e3,
        }
    if found.gpu_gib:
        values["peak_memory_gib"] = found.gpu_gib
    return {name: value for name, value in values.items() if name in figure.shows}


def predicted_words(figure: PaperFigure, found: Sequence[FigurePoint]) -> str:
    """How many values a predictor gives for a figure, by metric."""
    counts = {name: sum(name in entry.values for entry in found) for name in figure.shows}
    given = [f"{count} {SHORT[name]}" for name, count in counts.items() if count]
    return ", ".join(given) or ("none needed" if figure.computed else "none")


def predictor_words(hardware: Hardware) -> str:
    """What the predicted values are, on which hardware, and why there is no speed where there is none."""
    words = f"predicted: for the paper's set-ups on {gpu_text(hardware.title)} ({PREDICTOR.name})."
    if missing := assumed(hardware):
        words += f" experiments/hardware/{hardware.name}.yaml lacks {', '.join(missing)}: common values stand for them."
    return words
