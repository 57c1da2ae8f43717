"""The best configuration of every set-up that ran on GPUs, beside the next one, with a verdict on the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.base.lengths import format_length
from harness.report.results import Row
from harness.report.speedup import compared, verdict_text
from harness.report.tables.table import Column, Table, significant, without_empty_columns
from harness.report.variants import on_cpu, panel_name, panel_of, series_of, setups_of
from harness.report.weak_forms import WeakForm, marked, weak_forms


def best_table(rows: Sequence[Row]) -> Table | None:
    """A line per set-up: the lowest median step at its longest sequence that several series were measured at.

    None where there is none: a single series is the best of nothing, and times on a CPU do not tell.
    """
    best = [found for group in setups_of(rows) if not on_cpu(group[0]) and (found := _best_two(group))]
    if not best:
        return None
    columns = (
        Column(header="task"),
        Column(header="model"),
        Column(header="method"),
        Column(header="tokens", form=format_length, numeric=True),
        Column(header="parallel"),
        Column(header="tok/s/GPU", form=significant(4), numeric=True),
        Column(header="MFU %", form=significant(3, 100), numeric=True),
        Column(header="peak GiB", form=significant(3), numeric=True),
        Column(header="next"),
        Column(header="its time ÷ best", form="{:.2f}×".format, numeric=True),
        Column(header="verdict"),
    )
    several = len(best) > 1
    return without_empty_columns(
        Table(
            name="best",
            title="Best configuration" + ("s" if several else ""),
            columns=columns,
            rows=tuple(_line(*found) for found in best),
            note="Lowest median step at the longest sequence that several configurations were measured at. faster: the "
            "95% interval of the ratio excludes 1; with fewer than three rounds there is no interval.",
            trials=tuple(row for (_, row), _ in best),
        )
    )


def _best_two(group: Sequence[Row]) -> tuple[tuple[str, Row], tuple[str, Row]] | None:
    """Name and fastest trial of the best series and of the next one, at the largest point of several series."""
    points: dict[tuple[int, tuple[int, int, int]], dict[str, Row]] = {}
    weak = weak_forms(group)
    for name, members in series_of(group):
        for row in members:
            if row["status"] == "ok":
                series = points.setdefault((row["seq_len"], panel_of(row)), {})
                if name not in series or _seconds(row) < _seconds(series[name]):
                    series[name] = row
    contested = [point for point, series in points.items() if len(series) > 1]
    if not contested:
        return None
    first, second, *_ = sorted(points[max(contested)].items(), key=lambda item: _seconds(item[1]))
    return _named(first, weak), _named(second, weak)


def _named(found: tuple[str, Row], weak: Mapping[int, WeakForm]) -> tuple[str, Row]:
    name, row = found
    return marked(name, id(row) in weak), row


def _seconds(row: Row) -> float:
    """Of one step for each token of the GPU, so that batches of different sizes compare."""
    return 1.0 / float(row["tokens_per_gpu_per_second"])


def _line(best: tuple[str, Row], second: tuple[str, Row]) -> tuple[object, ...]:
    (name, row), (other, behind) = best, second
    found = compared([row], [behind])
    assert found is not None, "ok trials have steps"
    return (
        row["task"],
        f"{row['model']} {row['dtype']}",
        name,
        row["seq_len"],
        panel_name(panel_of(row)),
        row["tokens_per_gpu_per_second"],
        row["mfu"],
        row["peak_memory_gib"],
        other,
        _seconds(behind) / _seconds(row),
        verdict_text(found.times.verdict(), found.rounds, found.apart),
    )
