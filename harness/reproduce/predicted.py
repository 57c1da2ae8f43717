"""What is predicted for the points of a figure: times of the simulated schedule, and memory as the system holds it
whose settings a trial has as published, otherwise the engine's.

The published points come first, each with its own set-up, then trials of a scale of the figure's experiment. A list of
figures needs to know how many values there are and none of them, so a value is computed when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from baselines.paper_cluster import GPUS_PER_NODE
from engine.settings import TrialSettings
from harness.metrics.flops import counted_flops, tokens_per_step, work_of
from harness.metrics.hardware import Hardware, assumed, hardware_named, speeds_of
from harness.plan.forecast import forecast, knows_system, machine_of
from harness.plan.matrix import asked_for, plan
from harness.plan.predict import attention_or_reason, memory_is_modelled
from harness.plan.unsupported import unsupported_reason
from harness.predict.published import Configuration, configuration_of
from harness.predict.validation import HARDWARE, predicted_gib, predicted_time
from harness.reproduce.figures import METRICS, PaperFigure
from harness.reproduce.points import FigurePoint, gpu_text, predicted_entry, published_points
from harness.spec.experiment import load_experiment
from harness.spec.trial import Trial

PAPER_HARDWARE, PAPER_SCALE = "a800", "paper"
# What a figure calls the predicted values.
PREDICTOR = (
    "the schedule simulated; memory as published systems hold it, where their software was fitted, or the engine"
)


@dataclass(frozen=True, kw_only=True)
class Predictable:
    """A point of a figure of which something is predicted: a trial, or the configuration of a published point."""

    figure: PaperFigure
    metrics: Sequence[str]  # of the figure that are predicted
    settings: TrialSettings
    hardware: Hardware
    published: FigurePoint | None = None  # both None of a trial
    configuration: Configuration | None = None

    @cached_property
    def point(self) -> FigurePoint:
        """The point without values."""
        return self.published or predicted_entry(self.figure, self.settings, self.hardware.title, {})

    def predicted(self) -> FigurePoint:
        """The point with its values."""
        seconds, gib = self._published() if self.configuration else predicted_trial(self.settings, self.hardware)
        values = _values(self.settings, seconds, gib)
        return replace(self.point, values={name: values[name] for name in self.metrics})

    def _published(self) -> tuple[float, float]:
        """Seconds and GiB in the program that was published."""
        configuration = self.configuration
        assert configuration is not None, "asked of published points alone"
        seconds = predicted_time(configuration, speeds_of(self.hardware)).seconds
        return seconds, predicted_gib(configuration, self.hardware.waiting_layers or 0.0)


def predicted_trial(settings: TrialSettings, hardware: Hardware) -> tuple[float | None, float | None]:
    """Seconds of a step or call of a trial, and GiB of the fullest GPU; None where nothing is predicted."""
    found = forecast(settings, hardware)
    gib = found.gpu_gib
    if settings.settings == "as_published" and found.system_gib is not None:
        gib = found.system_gib
    return found.time.seconds if found.time else None, gib


def trials_of(figure: PaperFigure, scale: str, hardware: Hardware) -> list[Trial]:
    """The trials of a scale on nodes of eight such GPUs. Raises UsageError for a scale that the file has not."""
    hardware = replace(hardware, gpus_per_node=GPUS_PER_NODE)
    return list(plan(load_experiment(figure.experiment, scale), machine_of(hardware), hardware=hardware))


def predicted_entries(figure: PaperFigure, scale: str, hardware: Hardware) -> list[FigurePoint]:
    """A point for each trial of the scale that can run and of which something is predicted that the figure shows."""
    settings = (trial.settings for trial in trials_of(figure, scale, hardware) if trial.unsupported_reason is None)
    return [one.predicted() for one in _of_trials(figure, settings, hardware)]


def predicted_for_paper(figure: PaperFigure) -> list[FigurePoint]:
    """What is drawn beside the published points, with values."""
    trials = trials_of(figure, PAPER_SCALE, hardware_named(PAPER_HARDWARE))
    settings = (trial.settings for trial in trials if trial.unsupported_reason is None)
    return [one.predicted() for one in _for_paper(figure, settings)]


def predicted_words(figure: PaperFigure) -> str:
    """How many values are predicted for a figure, by metric. What the planner would choose changes none of them."""
    hardware = replace(hardware_named(PAPER_HARDWARE), gpus_per_node=GPUS_PER_NODE)
    machine = machine_of(hardware)
    asked = asked_for(load_experiment(figure.experiment, PAPER_SCALE))
    found = _for_paper(figure, (each for each in asked if unsupported_reason(each, machine) is None))
    counts = {name: sum(name in one.metrics for one in found) for name in figure.shows}
    given = [f"{count} {METRICS[name].predicted}" for name, count in counts.items() if count]
    return ", ".join(given) or ("none needed" if figure.computed else "none")


def _for_paper(figure: PaperFigure, settings: Iterable[TrialSettings]) -> list[Predictable]:
    """Of each published point with a number its own set-up, as results/paper/predicted.csv has it, and trials of the
    figure's scale `paper`. Of trials with settings as published those are left out that a published set-up stands for
    already."""
    rows = list(_of_published_points(figure))
    known = {(one.point.series, one.point.setup) for one in rows}
    return rows + [
        one for one in _of_trials(figure, settings, hardware_named(PAPER_HARDWARE))
        if one.settings.settings == "equal" or (one.point.series, one.point.setup) not in known
    ]  # fmt: skip


def _of_trials(figure: PaperFigure, trials: Iterable[TrialSettings], hardware: Hardware) -> Iterator[Predictable]:
    hardware = replace(hardware, gpus_per_node=GPUS_PER_NODE)
    for settings in trials:
        timed = attention_or_reason(settings, hardware)[0] is not None
        as_published = settings.settings == "as_published" and timed and knows_system(settings, hardware)
        held = memory_is_modelled(settings) or as_published
        if metrics := _shown(figure, timed, held):
            yield Predictable(figure=figure, metrics=metrics, settings=settings, hardware=hardware)


def _of_published_points(figure: PaperFigure) -> Iterator[Predictable]:
    """The simulated time of each published point whose source says enough, and the memory of its system."""
    for point, row in published_points(figure):
        configuration, _ = configuration_of(row)
        if not point.values or row.gpu_model not in HARDWARE or configuration is None:
            continue
        hardware, settings = hardware_named(HARDWARE[row.gpu_model]), configuration.settings
        held = hardware.waiting_layers is not None and settings.task == "train"
        if metrics := _shown(figure, True, held):
            point = replace(point, origin="predicted", hardware=hardware.title, values={}, status="ok", note="")
            yield Predictable(
                figure=figure, metrics=metrics, settings=settings, hardware=hardware, published=point,
                configuration=configuration,
            )  # fmt: skip


def _shown(figure: PaperFigure, timed: bool, held: bool) -> list[str]:
    """Metrics of the figure that follow from a time and from memory, where these are predicted."""
    known = {"peak_memory_gib": held}
    return [name for name in figure.shows if METRICS[name].predicted and known.get(name, timed)]


def _values(settings: TrialSettings, seconds: float | None, gib: float | None) -> dict[str, float]:
    values = {"peak_memory_gib": gib} if gib is not None else {}
    if seconds is not None:
        gpu_seconds = seconds * settings.world_size
        values |= {
            "tokens_per_gpu_per_second": tokens_per_step(settings) / gpu_seconds,
            "tflops_per_gpu": counted_flops(settings, work_of(settings)) / gpu_seconds / 1e12,
            "forward_backward_ms": seconds * 1e3,
        }
    return values


def predictor_words(hardware: Hardware) -> str:
    """What the predicted values are, on which hardware, and why there is no speed where there is none."""
    words = f"predicted: for the paper's set-ups on {gpu_text(hardware.title)} ({PREDICTOR})."
    if missing := assumed(hardware):
        words += f" experiments/hardware/{hardware.name}.yaml lacks {', '.join(missing)}: common values stand for them."
    return words
