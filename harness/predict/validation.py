"""`python -m harness.predict.validation`: predictions beside published numbers, into results/paper and docs/plan.md.

Which configurations are fitted and which are held out stands in results/paper/prediction_split.csv, decided by the hash
of a configuration before anything was fitted: all metrics and repeats of one configuration are on one side. The speeds
of `a800` were fitted to the times of the fitted half, `waiting_layers` is fitted to its peaks of memory.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from baselines.paper_cluster import GPUS_PER_NODE
from engine.atomic import write_atomic
from harness.metrics.hardware import HardwareSpeeds, hardware_named, speeds_of
from harness.metrics.throughput import GIB
from harness.predict.published import MEMORY, REFERENCE, SPEED, TIMES, Configuration, Published, configurations
from harness.predict.step import StepTime, step_time
from harness.predict.systems import BURST_ENGINE, system_memory

SPLIT_FILE = REFERENCE.with_name("prediction_split.csv")
FIT, HELD_OUT = "fit", "held_out"
IN_WORDS = {FIT: "fitted", HELD_OUT: "held out"}
HARDWARE = {"A800-80GB": "a800", "A100": "a100"}
FITTED_GPU = "A800-80GB"
LARGEST_ERROR = math.log(1.5)  # of one configuration in the fit: beyond it, something else decides
END_TO_END = ("e2e_main", "ablation", "checkpointing", "cp_scaling")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedMetric:
    """One metric of one configuration: published, the median of its rows, and predicted; in seconds or GiB."""

    configuration: Configuration
    metric: str
    rows: Sequence[Published]
    published: float | None  # None: out of memory, as the sheet says; the cause was not checked
    predicted: float

    @property
    def error(self) -> float | None:
        """Predicted over published, less one."""
        return None if self.published is None else self.predicted / self.published - 1

    @property
    def side(self) -> str:
        name = self.configuration.name
        return split().get(name, side_of(name))

    @property
    def training(self) -> bool:
        return self.configuration.settings.task == "train"

    @property
    def experiments(self) -> list[str]:
        """Whose rows it has."""
        return sorted({row.experiment for row in self.rows})

    @property
    def methods(self) -> list[str]:
        """As the sources name them."""
        return sorted({row.method for row in self.rows})

    @property
    def end_to_end(self) -> bool:
        return any(name in END_TO_END for name in self.experiments)


@cache
def split() -> Mapping[str, str]:
    """Side of each configuration by its name."""
    with SPLIT_FILE.open(encoding="utf-8", newline="") as file:
        return {row["configuration"]: row["side"] for row in csv.DictReader(file)}


def side_of(name: str) -> str:
    """The rule behind the committed file: half of all hashes."""
    return FIT if int(name, 16) % 2 else HELD_OUT


@cache
def compare_times() -> tuple[ComparedMetric, ...]:
    """Every published configuration with a speed or a time, at the committed constants of its GPU."""
    found = []
    for configuration, rows in configurations(SPEED, *TIMES):
        given = [row for row in rows if row.value is not None]
        if not given:
            continue
        time = predicted_time(configuration, speeds_of(hardware_named(HARDWARE[given[0].gpu_model])))
        for metric in sorted({row.metric for row in given}):
            of_metric = [row for row in given if row.metric == metric]
            found.append(
                ComparedMetric(
                    configuration=configuration,
                    metric=metric,
                    rows=of_metric,
                    published=statistics.median(seconds_of(row, configuration) for row in of_metric),
                    predicted=time.attention_forward if metric == "forward_ms" else time.seconds,
                )
            )
    return tuple(found)


def predicted_time(configuration: Configuration, speeds: HardwareSpeeds) -> StepTime:
    """The time of a published set-up, on nodes of eight GPUs."""
    return step_time(configuration.settings, speeds, node_ranks=GPUS_PER_NODE, attention=configuration.attention)


def predicted_gib(configuration: Configuration, waiting_layers: float) -> float:
    """The peak of the fullest GPU under a published set-up, in its own program."""
    nbytes = system_memory(configuration.settings, configuration.system, configuration.attention, waiting_layers)
    return nbytes / GIB


def seconds_of(row: Published, configuration: Configuration) -> float:
    """Of the step or call that a speed or a time was published of."""
    if row.metric in TIMES:
        return row.number / 1000
    settings = configuration.settings
    return settings.seq_len * settings.dp_size * settings.batch_size / settings.world_size / row.number


def compare_memory(waiting_layers: float | None = None) -> list[ComparedMetric]:
    """Every published configuration with a peak, at the committed constant or at another one."""
    if waiting_layers is None:
        waiting_layers = hardware_named(HARDWARE[FITTED_GPU]).waiting_layers or 0.0
    return [_compared_memory(*each, waiting_layers) for each in _with_peaks()]


@cache
def _with_peaks() -> list[tuple[Configuration, list[Published]]]:
    return configurations(MEMORY)


def _compared_memory(configuration: Configuration, rows: Sequence[Published], waiting_layers: float) -> ComparedMetric:
    peaks = [row.value for row in rows if row.value is not None]
    return ComparedMetric(
        configuration=configuration,
        metric=MEMORY,
        rows=rows,
        published=statistics.median(peaks) if peaks else None,
        predicted=predicted_gib(configuration, waiting_layers),
    )


def fit_waiting_layers() -> float:
    """The constant under which the fitted half's training rows are predicted best: the mean absolute logarithm of
    predicted over published, tried in steps of a tenth of a layer."""

    def loss(waiting_layers: float) -> float:
        chosen = (row for row in compare_memory(waiting_layers) if row.side == FIT and row.training)
        errors = (row.error for row in chosen if row.error is not None)
        return statistics.fmean(min(LARGEST_ERROR, abs(math.log1p(error))) for error in errors)

    return min((tenth / 10 for tenth in range(1, 600)), key=loss)


def sizes_of_errors(rows: Iterable[ComparedMetric]) -> list[float]:
    """Errors without their sign, the smallest first, of rows that have one."""
    return sorted(abs(row.error) for row in rows if row.error is not None)


def median_error(rows: Iterable[ComparedMetric]) -> float:
    """Median of the absolute errors; NaN of none."""
    errors = sizes_of_errors(rows)
    return statistics.median(errors) if errors else math.nan


TABLE_FILE = REFERENCE.with_name("predicted.csv")
MEMORY_FILE = REFERENCE.with_name("predicted_memory.csv")
PAGE = REFERENCE.parents[2] / "docs" / "plan.md"
ERRORS, MEMORY_ERRORS = "errors", "errors of memory"  # names of blocks of the page
HEADER = [
    "configuration", "side", "experiments", "gpu", "gpus", "cp_size", "model", "seq_len", "methods", "metric", "rows",
    "published_seconds", "predicted_seconds", "error_percent",
]  # fmt: skip
MEMORY_HEADER = [
    "configuration", "side", "experiments", "system", "task", "gpus", "cp_size", "model", "seq_len", "methods", "rows",
    "published_gib", "predicted_gib", "error_percent",
]  # fmt: skip


def table_rows() -> list[list[str]]:
    """Times below a header, the worst prediction last."""
    return [HEADER, *(_cells(row, HEADER) for row in sorted(compare_times(), key=_place))]


def memory_rows() -> list[list[str]]:
    """The same of memory; where the sheet says out of memory there is no error, and the row stands last."""
    return [MEMORY_HEADER, *(_cells(row, MEMORY_HEADER) for row in sorted(compare_memory(), key=_place))]


def _place(row: ComparedMetric) -> tuple[bool, float, str, str]:
    return row.error is None, abs(row.error or 0.0), row.configuration.name, row.metric


def _cells(row: ComparedMetric, header: Sequence[str]) -> list[str]:
    """A row of a table with these columns."""
    settings = row.configuration.settings
    published = "oom" if row.published is None else f"{row.published:.4g}"
    cells = {
        "configuration": row.configuration.name,
        "side": row.side,
        "experiments": "; ".join(row.experiments),
        "gpu": row.rows[0].gpu_model,
        "system": row.configuration.system.name,
        "task": settings.task,
        "gpus": str(settings.world_size),
        "cp_size": str(settings.cp_size),
        "model": settings.model.name,
        "seq_len": str(settings.seq_len),
        "methods": "; ".join(row.methods),
        "metric": row.metric,
        "rows": str(len(row.rows)),
        "error_percent": "" if row.error is None else f"{100 * row.error:+.1f}",
    }
    for unit in ("seconds", "gib"):
        cells |= {f"published_{unit}": published, f"predicted_{unit}": f"{row.predicted:.4g}"}
    return [cells[name] for name in header]


Kinds = Mapping[str, Callable[[ComparedMetric], bool]]
_OF_TIMES: Kinds = {
    "end-to-end, ablation, checkpointing, CP scaling": lambda row: row.end_to_end,
    "all others": lambda row: not row.end_to_end,
}
_OF_MEMORY: Kinds = {
    "training, BurstEngine": lambda row: row.training and row.configuration.system is BURST_ENGINE,
    "training, other systems": lambda row: row.training and row.configuration.system is not BURST_ENGINE,
    "attention alone": lambda row: not row.training,
    "all": lambda row: True,
}


def summary() -> str:
    """Markdown: errors of times by kind of row and side."""
    return _errors(compare_times(), _OF_TIMES, "nine of ten within", 0.9)


def memory_summary() -> str:
    """The same of memory."""
    return _errors(compare_memory(), _OF_MEMORY, "largest error", 1.0)


def _errors(rows: Sequence[ComparedMetric], kinds: Kinds, widest: str, share: float) -> str:
    """A line for each kind and side; its last cell is the error within which this share of the rows lies."""
    lines = []
    for label, belongs in kinds.items():
        for side, said in IN_WORDS.items():
            errors = sizes_of_errors(row for row in rows if row.side == side and belongs(row))
            within = errors[min(len(errors) - 1, round(share * len(errors)))]
            median = f"{100 * statistics.median(errors):.1f}%"
            lines.append([label, said, str(len(errors)), median, f"{100 * within:.0f}%"])
    return markdown_table(["published rows", "side", "configurations", "median error", widest], lines)


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of a page."""
    head, *rows = (f"| {' | '.join(cells)} |" for cells in (header, *lines))
    return "\n".join([head, f"|{'---|' * len(header)}", *rows])


def marks(name: str) -> tuple[str, str]:
    """Where a block of a page begins and ends."""
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def write_table(path: Path, rows: list[list[str]]) -> None:
    """Write a table as CSV and say how long it is."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomic(path, text.getvalue())
    print(f"{path.name}: {len(rows) - 1} rows")


def write_block(name: str, text: str, page: Path = PAGE) -> None:
    """Put the text between a block's marks in the page."""
    begin, end = marks(name)
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    write_atomic(page, before + begin + "\n" + text + "\n" + end + rest.partition(end)[2])


def main() -> None:
    write_table(TABLE_FILE, table_rows())
    write_table(MEMORY_FILE, memory_rows())
    write_block(ERRORS, summary())
    write_block(MEMORY_ERRORS, memory_summary())


if __name__ == "__main__":
    main()
