"""The figures and tables of the paper: which published rows each has, and which settings of ours they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

from cluster.files.reader import build, read_yaml
from harness.base.errors import UsageError, nearest
from harness.predict.published import Published, published_rows
from harness.spec.references import PAPER_DIR, paper_experiments

T = TypeVar("T")

FIGURES_FILE = "figures.yaml"
TABLES = ("claims", "audit")  # that `burst reproduce` prints beside the figures
EXPERIMENTS_DIR = Path(__file__).parents[2] / "experiments" / "paper"
_CP_SIZE = re.compile(r" \[sp=(\d+)\]$")
_CP_UNSTATED = " [sp unstated]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """What a figure shows along one axis: its unit, and where a number of ours for it comes from."""

    unit: str
    column: str = ""  # of our rows; empty where nothing is measured
    scale: float = 1.0  # one unit of that column in units of the metric
    predicted: str = ""  # what the list of figures calls predicted values; empty where none are


METRICS: Mapping[str, Metric] = {
    "tokens_per_gpu_per_second": Metric(
        unit="tokens/s per GPU", column="tokens_per_gpu_per_second", predicted="speeds"
    ),
    "peak_memory_gib": Metric(unit="GiB per GPU", column="peak_memory_gib", predicted="memory"),
    "tflops_per_gpu": Metric(unit="TFLOP/s per GPU", column="tflops_per_gpu", predicted="TFLOP/s"),
    "forward_backward_ms": Metric(
        unit="ms, forward and backward", column="step_seconds_median", scale=1e3, predicted="times"
    ),
    "attention_output_store_gib_all_gpus": Metric(unit="GiB over all GPUs"),
    "logits_memory_gib_all_gpus": Metric(unit="GiB over all GPUs"),
    "attention_flops_share": Metric(unit="share of the FLOPs"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """What a published method stands for: settings of ours by column, and the CP size where its name has one."""

    name: str
    settings: Mapping[str, object]
    cp_size: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperFigure:
    """One figure or table of the paper. `experiment` is the file that asks its question again."""

    name: str
    title: str
    reference: str
    shows: list[str]  # metrics, one drawing each
    series: dict[str, dict[str, object]]
    drawn_from: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    also: list[str] = field(default_factory=list)
    with_rows: dict[str, list[str]] = field(default_factory=dict)
    computed: str = ""
    along: Literal["seq_len", "batch_size"] = "seq_len"
    note: str = ""

    @property
    def experiment(self) -> Path:
        return EXPERIMENTS_DIR / f"{self.name}.yaml"

    def rows(self) -> list[Published]:
        """Its published numbers, those that were derived when the file was made left out; then those of other
        experiments' methods in `with_rows` at its own models, GPUs and lengths."""
        read = [row for row in published_rows() if not row.derived]
        own = [
            row for row in read
            if row.experiment == self.reference
            and (not self.drawn_from or row.figure.startswith(tuple(self.drawn_from)))
        ]  # fmt: skip
        places = {(row.model, row.gpus, row.seq_len) for row in own}
        return own + [
            row for row in read
            if row.method in self.with_rows.get(row.experiment, ())
            and (row.model, row.gpus, row.seq_len) in places
        ]  # fmt: skip

    def series_of(self, method: str) -> Series | None:
        """What a published method stands for; None for one that is left out, or whose CP size is not stated."""
        base, cp_size = method, None
        if found := _CP_SIZE.search(method):
            base, cp_size = method[: found.start()], int(found[1])
        settings = self.series.get(base)
        return None if settings is None else Series(name=base, settings=settings, cp_size=cp_size)

    def why_left_out(self, method: str) -> str:
        """Why a published method has no series."""
        if method.endswith(_CP_UNSTATED):
            return "the CP size is not stated"
        return self.left_out.get(method) or self.left_out.get(_CP_SIZE.sub("", method), "")


@cache
def paper_figures() -> Mapping[str, PaperFigure]:
    """Every figure by its name, in the paper's order."""
    return read_figures(PAPER_DIR / FIGURES_FILE)


@cache
def without_figure() -> Mapping[str, str]:
    """Published experiments without a figure here, and why."""
    root = read_yaml(PAPER_DIR / FIGURES_FILE, "description of figures").mapping("the description")
    return {key: str(node.value) for key, node in root["without_figure"].mapping("without_figure").items()}


def figure_named(name: str) -> PaperFigure:
    """The figure of that name. Raises UsageError with its nearest neighbour."""
    figures = paper_figures()
    if name not in figures:
        raise UsageError(
            f"unknown figure {name}; {nearest(name, (*figures, *TABLES))} (`burst reproduce` lists the figures, "
            "`burst reproduce audit` and `claims` are tables)"
        )
    return figures[name]


def read_figures(path: Path) -> dict[str, PaperFigure]:
    """The figures that a file describes. Raises UsageError with file and line."""
    root = read_yaml(path, "description of figures").mapping("the description")
    found = {}
    for name, node in root["figures"].mapping("figures").items():
        figure = build(PaperFigure, node, f"figures.{name}", name=name)
        if figure.reference not in paper_experiments():
            hint = nearest(figure.reference, paper_experiments())
            raise UsageError(f"{node.place}: figure {name}: unknown reference {figure.reference}; {hint}")
        found[name] = figure
    return found
