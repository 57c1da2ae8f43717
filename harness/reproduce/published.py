"""Published numbers: one row of results/paper/reference.csv each."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster.files.filesystem import read_text
from harness.base.errors import UsageError
from harness.spec.references import PAPER_DIR

REFERENCE_FILE = "reference.csv"
ARTIFACT = "thunlp/BurstEngine at 426eb7a"  # whose sheets and scripts most rows were read from
COLUMNS = (
    "experiment", "figure", "gpus", "nodes", "gpu_model", "model", "seq_len", "method", "metric", "value", "unit",
    "source",
)  # fmt: skip
OUT_OF_MEMORY = "oom"
SPEED, MEMORY = "tokens_per_gpu_per_second", "peak_memory_gib"  # metrics of training


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """One number that others published, or the reason why they give none (`unit` oom)."""

    experiment: str
    figure: str
    gpus: int | None
    nodes: int | None
    gpu_model: str
    model: str
    seq_len: int | None
    method: str
    metric: str
    value: float | None
    text: str  # the value as the file has it, with its digits
    unit: str
    source: str
    line: int  # of the file

    @property
    def derived(self) -> bool:
        """Whether the number was derived from another row when the file was made, rather than read."""
        return self.source.startswith("DERIVED")

    @property
    def number(self) -> float:
        """The value of a row that has one."""
        assert self.value is not None, self
        return self.value

    @property
    def cells(self) -> dict[str, str]:
        """What a configuration is read from, as the file has it."""
        names = ("experiment", "figure", "gpus", "model", "seq_len", "method", "source")
        return {name: "" if getattr(self, name) is None else str(getattr(self, name)) for name in names}

    @property
    def trial(self) -> tuple[object, ...]:
        """What rows of one published trial have in common: they differ in their metric."""
        return (self.experiment, self.figure, self.gpus, self.model, self.seq_len, self.method)

    @property
    def note(self) -> str:
        """What the source says about a doubtful number; empty for most."""
        return self.source.partition("NOTE ")[2]


@cache
def published_rows() -> tuple[Published, ...]:
    """All published numbers of the repository."""
    return read_published(PAPER_DIR / REFERENCE_FILE)


def read_published(path: Path) -> tuple[Published, ...]:
    """The rows of such a file. Raises UsageError with file and line for what is no such row."""
    reader = csv.reader(io.StringIO(read_text(path, "table of published numbers"), newline=""))
    header = next(reader, [])
    if tuple(header) != COLUMNS:
        raise UsageError(f"{path}:1: found the columns {', '.join(header) or 'nothing'}; expected {', '.join(COLUMNS)}")
    rows = []
    for cells in reader:
        place = f"{path}:{reader.line_num}"
        if len(cells) != len(COLUMNS):
            raise UsageError(f"{place}: found {len(cells)} cells; expected {len(COLUMNS)}")
        rows.append(_row(dict(zip(COLUMNS, cells, strict=True)), reader.line_num, place))
    return tuple(rows)


def _row(cells: dict[str, str], line: int, place: str) -> Published:
    try:
        gpus, nodes, seq_len = (
            int(float(cells[name])) if cells[name] else None for name in ("gpus", "nodes", "seq_len")
        )
        value = float(cells["value"]) if cells["value"] else None
    except ValueError as error:
        raise UsageError(f"{place}: {error}; expected a number or an empty cell") from error
    if value is None and cells["unit"] != OUT_OF_MEMORY:
        raise UsageError(f"{place}: the value is empty and the unit is {cells['unit']!r}; expected a value, or oom")
    return Published(
        experiment=cells["experiment"], figure=cells["figure"], gpus=gpus, nodes=nodes, gpu_model=cells["gpu_model"],
        model=cells["model"], seq_len=seq_len, method=cells["method"], metric=cells["metric"], value=value,
        text=cells["value"], unit=cells["unit"], source=cells["source"], line=line,
    )  # fmt: skip


def only(rows: Iterable[Published], **wanted: object) -> Published:
    """The one row with these values, such as `method="Burst-Ring", gpus=32`; of equal numbers the first.

    Raises LookupError where there is none, or where rows with these values hold different numbers.
    """
    found = [row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())]
    if len({row.text for row in found}) != 1:
        raise LookupError(f"{len(found)} published rows with {wanted}, of {len({row.text for row in found})} values")
    return found[0]
