"""The published peaks of memory as trials, beside what each system is predicted to hold, and the constant behind it."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from harness.metrics.hardware import hardware_named
from harness.metrics.throughput import GIB
from harness.predict.published_rows import (
    END_TO_END,
    REFERENCE,
    Configuration,
    configuration_of_row,
)
from harness.predict.systems import (
    BURST_ENGINE,
    INTERN_EVO,
    MEGATRON_DEEPSPEED,
    MEGATRON_LM,
    SystemMemory,
    system_memory,
)
from harness.predict.validation import FIT, FITTED_GPU, HARDWARE, LARGEST_ERROR, side_of, split

METRIC = "peak_memory_gib"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedMemory:
    """One row whose value is a peak, or out of memory."""

    experiment: str
    method: str  # as the source names it
    gib: float | None  # None: out of memory, as the sheet says; the cause was not checked
    configuration: Configuration
    system: SystemMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedMemory:
    """One configuration: the median of its rows, and predicted."""

    configuration: Configuration
    system: SystemMemory
    side: str
    experiments: str
    methods: str
    rows: int
    published_gib: float | None
    predicted_gib: float

    @property
    def error(self) -> float | None:
        """Predicted over published, less one; None where the row says out of memory."""
        return None if self.published_gib is None else self.predicted_gib / self.published_gib - 1

    @property
    def training(self) -> bool:
        return self.configuration.settings.task == "train"


@cache
def published_memory() -> tuple[PublishedMemory, ...]:
    """All rows of results/paper/reference.csv that hold a peak, in its order.

    Raises RowSaysTooLittle for one that names no configuration.
    """
    found = []
    with REFERENCE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["metric"] != METRIC:
                continue
            found.append(
                PublishedMemory(
                    experiment=row["experiment"],
                    method=row["method"],
                    gib=float(row["value"]) if row["value"] else None,
                    configuration=configuration_of_row(row),
                    system=system_of_row(row["method"], row["experiment"] in END_TO_END),
                )
            )
    return tuple(found)


def system_of_row(words: str, training: bool) -> SystemMemory:
    """The program behind the source's name of a method."""
    name = words.casefold()
    if name.startswith("megatron"):
        return MEGATRON_LM
    if name.startswith(("deepspeed", "ds-ulysses")):
        return MEGATRON_DEEPSPEED
    if "loong" in name or (not training and not name.startswith("burst")):  # the benchmark's other rings are its own
        return INTERN_EVO
    return BURST_ENGINE


def compare_memory(waiting_layers: float | None = None) -> list[ComparedMemory]:
    """Every published configuration with a peak, at the committed constant or at another one."""
    if waiting_layers is None:
        waiting_layers = hardware_named(HARDWARE[FITTED_GPU]).waiting_layers or 0.0
    return [_compared(name, rows, waiting_layers) for name, rows in _by_configuration()]


@cache
def _by_configuration() -> tuple[tuple[str, tuple[PublishedMemory, ...]], ...]:
    """Rows by the name of their configuration."""
    by_name: dict[str, list[PublishedMemory]] = {}
    for row in published_memory():
        by_name.setdefault(row.configuration.name, []).append(row)
    return tuple((name, tuple(rows)) for name, rows in by_name.items())


def _compared(name: str, rows: Sequence[PublishedMemory], waiting_layers: float) -> ComparedMemory:
    first, peaks = rows[0], [row.gib for row in rows if row.gib is not None]
    configuration = first.configuration
    nbytes = system_memory(configuration.settings, first.system, configuration.attention, waiting_layers)
    return ComparedMemory(
        configuration=configuration,
        system=first.system,
        side=split().get(name, side_of(name)),
        experiments="; ".join(sorted({row.experiment for row in rows})),
        methods="; ".join(sorted({row.method for row in rows})),
        rows=len(rows),
        published_gib=statistics.median(peaks) if peaks else None,
        predicted_gib=nbytes / GIB,
    )


def fit_waiting_layers() -> float:
    """The constant under which the fitted half's training rows are predicted best: the mean absolute logarithm of
    predicted over published, tried in steps of a tenth of a layer."""
    return min((tenth / 10 for tenth in range(1, 600)), key=_loss)


def _loss(waiting_layers: float) -> float:
    errors = [
        min(LARGEST_ERROR, abs(math.log1p(row.error)))
        for row in compare_memory(waiting_layers)
        if row.error is not None and row.side == FIT and row.training
    ]
    return statistics.fmean(errors)


def median_memory_error(rows: Iterable[ComparedMemory]) -> float:
    """Median of the absolute errors of those with a peak; NaN of none."""
    errors = [abs(row.error) for row in rows if row.error is not None]
    return statistics.median(errors) if errors else math.nan
