"""Who is faster in a run: at each size the series that were measured there, sorted by speed, one beside all others.

A size is what trials must share to be put beside each other: the set-up, the length, the parallel sizes, the tokens of
a step and the machine's nodes. Settings may differ, and then stand in the names; of methods the verdict compares two
under one value of `settings`, where there are two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.base.lengths import format_length
from harness.metrics.intervals import Interval, median_interval, medians_of_two
from harness.report.digits import MeasuredNumber, ratio_spread_text, ratio_text, supported
from harness.report.results import Row, grouped
from harness.report.speedup import (
    SlowBaseline,
    Speedup,
    marked,
    rounds_of,
    rounds_text,
    slow_baselines,
    speedup,
    times,
)
from harness.report.tables.particular import form_of
from harness.report.tables.table import Table, number, significant, table_of, text
from harness.report.variants import (
    LABEL,
    is_subject,
    method_name,
    on_cpu,
    panel_name,
    panel_of,
    pooled,
    series_of,
    settings_name,
    setup_of,
    varying_settings,
)
from harness.spec.table import EQUAL

MOST_NAMED = 2  # settings that name a choice of them; of more, what differs from most choices is said
# By task, the most telling first.
_WORK = {"train": "Training", "attention": "Attention", "lm_head": "LM head", "linear": "Linear layer"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedSeries:
    """One series at one size. Its trials differ in their seeds alone."""

    name: str
    rows: list[Row]

    @property
    def method(self) -> str:
        return str(self.rows[0]["method"])

    @property
    def called(self) -> str:
        """The method by the name that is shown."""
        return str(self.rows[0].get(LABEL) or self.method)

    @property
    def short(self) -> str:
        """The name in a sentence, without a schedule that it says already."""
        return re.sub(r", schedule \w+", "", self.name) if "(" in self.name else self.name

    @property
    def speed(self) -> MeasuredNumber:
        """Tokens per second and rank, with its interval."""
        rounds = list(rounds_of(self.rows).values())
        seconds = median_interval(rounds) or medians_of_two(rounds)
        first = self.rows[0]
        tokens = first["tokens_per_gpu_per_second"] * first["step_seconds_median"]  # of one rank and step
        value = pooled(self.rows, "tokens_per_gpu_per_second")
        assert value is not None, "an ok trial has a speed"
        return MeasuredNumber(value, seconds and seconds.inverse_times(tokens))

    def is_rival(self, other: RankedSeries) -> bool:
        """Whether the other is of another method, under the same value of `settings`."""
        return self.method != other.method and self.rows[0]["settings"] == other.rows[0]["settings"]

    def of(self, column: str) -> float | None:
        """The median of a column over its trials."""
        return pooled(self.rows, column)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRanking:
    """The measured series of one size, the fastest first, and those that gave no number with how they ended."""

    rows: list[Row]
    compared: list[RankedSeries]
    lost: list[tuple[str, str]]
    baseline: str | None = None

    @property
    def of_methods(self) -> bool:
        """Whether several methods were measured; else settings of one method are put beside each other."""
        return len({series.method for series in self.compared}) > 1

    @property
    def only_settings_named(self) -> bool:
        """Whether names are settings, without the one method that they were given to."""
        return not any(series.name.startswith(series.called) for series in self.compared)

    @property
    def subject(self) -> RankedSeries:
        """The series that is put beside the others: the fastest of the subject's, first of those whose value of
        `settings` another method ran with as well; else the fastest."""
        others = [one for one in self.compared if one.method != self.baseline]
        own = [one for one in others if is_subject(one.rows[0])]
        met = [one for one in own if any(one.is_rival(other) for other in self.compared)]
        return [*met, *own, *others, *self.compared][0]

    @property
    def other(self) -> RankedSeries | None:
        """The fastest that the subject is compared with: of another method, of the baseline where there is one. Where
        one method was measured alone, the fastest with another setting."""
        subject = self.subject
        others = [one for one in self.compared if one is not subject]
        if self.of_methods:
            others = [one for one in others if one.method != subject.method]
            others = [one for one in others if one.method == self.baseline] or others
            others = [one for one in others if subject.is_rival(one)] or others
        return next(iter(others), None)

    def beside(self, other: RankedSeries) -> Speedup | None:
        """The subject's speed over another's."""
        return speedup(self.subject.rows, other.rows)

    def between(self, one: RankedSeries, other: RankedSeries) -> SizeRanking:
        """These two alone."""
        return replace(self, compared=[one, other], lost=[])

    @property
    def place(self) -> str:
        """`Training 1b, 128k tokens, 1 × H200`, with dtype and mask where they are not bf16 and causal."""
        row = self.subject.rows[0]
        parts = [f"{_WORK[row['task']]} {row['model']}"]
        if row["dtype"] != "bf16":
            parts.append(row["dtype"])
        if row["task"] == "lm_head":
            parts.append(f"{format_length(row['seq_len'] * row['batch_size'] // row['cp_size'])} tokens per rank")
        else:
            sequences = _sequences(row)
            parts.append(f"{f'{sequences} × ' if sequences > 1 else ''}{format_length(row['seq_len'])} tokens")
            if row["mask"] != "causal":
                parts.append(f"mask {row['mask']}")
        if row["settings"] != EQUAL and len({one["settings"] for one in self.rows}) == 1:
            parts.append(f"settings {row['settings']}")
        if row["cp_size"] != row["world_size"] or row["tp_size"] > 1:
            parts.append(panel_name(panel_of(row)))
        return ", ".join([*parts, _machine(row)])


def rankings_of(rows: Sequence[Row], baseline: str | None = None) -> list[SizeRanking]:
    """Every size on GPUs at which something was measured, the most telling first: several methods before several
    settings before a single series, training before its parts, long sequences before short ones, many ranks before
    few. A wrong trial takes part in none. With `baseline` that method is compared with, where it was measured."""
    sizes = grouped((row for row in rows if not on_cpu(row) and row["status"] != "wrong"), _size)
    slow = slow_baselines(rows)
    rankings = [found for group in sizes.values() if (found := _ranking(group, slow, baseline))]
    return sorted(rankings, key=_telling)


def verdict_sentence(ranking: SizeRanking) -> str:
    """Who is faster, by how much and how sure, in one sentence."""
    subject, other = ranking.subject, ranking.other
    found = ranking.beside(other) if other else None
    ours = f"{subject.called} with {subject.name}" if ranking.only_settings_named else subject.short
    if other is None or found is None:
        speed = f"{supported()(subject.speed)} tokens/s per GPU"
        return f"{ours} ran at {speed}; nothing was measured beside it."
    theirs, ratio = other.short, f"{ratio_text(found.ratio)} times as fast"
    rounds = rounds_text(found.rounds)
    sure = f"{found.between}, {rounds}" if isinstance(found.spread, Interval) else f"{found.between} in {rounds}"
    sure = "; ".join([sure, *found.caveats])
    if found.spread is None:
        return f"{ours} ran {ratio} as {theirs} in one round, which cannot tell a difference from noise."
    if found.verdict == "not distinguishable":
        return f"{ours} and {theirs} are not distinguishable: {ratio} ({sure})."
    if found.verdict.startswith("slower"):
        return f"{ours} is slower than {theirs}: {ratio} ({sure})."
    return f"{ours} is {ratio} as {theirs} ({sure})."


def word_beside(found: Speedup | None) -> str:
    """The verdict on the other side of a ratio: `slower` where the subject is faster."""
    if found is None:
        return ""
    word, _, rest = found.verdict.partition(" ")
    opposite = {"faster": "slower", "slower": "faster"}.get(word)
    return f"{opposite} {rest}".strip() if opposite else found.text


def sizes_table(rankings: Sequence[SizeRanking]) -> Table | None:
    """A line per size: the subject, what it is compared with, the ratio of their speeds, and the verdict."""
    lines = [(one, one.subject, one.other, one.beside(one.other) if one.other else None) for one in rankings]
    several_runs = len({one.rows[0]["run"] for one in rankings}) > 1
    columns = (
        text("set-up", lambda line: line[0].place),
        text("run", lambda line: line[0].rows[0]["run"] if several_runs else None),
        text("method", lambda line: line[1].name),
        text("beside", lambda line: line[2] and line[2].name),
        number("times as fast", lambda line: line[3] and line[3].ratio, times),
        number("interval", lambda line: line[3] and line[3].spread, ratio_spread_text),
        text("verdict", lambda line: line[3].text if line[3] else "alone"),
        number("tok/s/GPU", lambda line: line[1].speed, supported()),
        number("peak GiB", lambda line: line[1].of("peak_memory_gib"), significant(3)),
    )
    return table_of("sizes", "Other set-ups", columns, lines)


def _ranking(rows: list[Row], slow: Mapping[int, SlowBaseline], baseline: str | None) -> SizeRanking | None:
    compared, lost = [], []
    for name, members in _named(rows):
        measured = [row for row in members if row["status"] == "ok"]
        if measured:
            compared.append(RankedSeries(name=marked(name, id(measured[0]) in slow), rows=measured))
        else:
            lost.append((name, "/".join(sorted({row["status"] for row in members}))))
    if not compared:
        return None
    compared.sort(key=lambda series: -series.speed)
    return SizeRanking(rows=rows, compared=compared, lost=lost, baseline=baseline)


def _named(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Series of one size by name: of the LM head the forms; of one method with few settings that vary, these alone."""
    series = series_of(rows)
    if rows[0]["task"] == "lm_head":
        shorter = [form_of(members[0]) for _, members in series]
    elif len({method_name(row) for row in rows}) == 1:
        varying = varying_settings(rows)
        shorter = [settings_name(members[0], varying) for _, members in series] if len(varying) <= MOST_NAMED else []
    else:
        shorter = []
    if len(set(shorter)) < len(series) or not all(shorter):
        return series
    return [(name, members) for name, (_, members) in zip(shorter, series, strict=True)]


def _telling(ranking: SizeRanking) -> tuple[Any, ...]:
    """Sort key of a ranking."""
    row = ranking.rows[0]
    kind = 0 if ranking.of_methods else 1 if len(ranking.compared) > 1 else 2
    return (kind, list(_WORK).index(row["task"]), -row["seq_len"], -row["world_size"], -ranking.subject.speed)


def _size(row: Row) -> tuple[Any, ...]:
    return (setup_of(row), row["seq_len"], panel_of(row), _sequences(row), row["emulate_nodes"])


def _sequences(row: Row) -> int:
    return int(row["batch_size"] * row["dp_size"] * row["gradient_accumulation"])


def _machine(row: Row) -> str:
    gpu = str(row["gpu"]).removeprefix("NVIDIA ")
    nodes = row["nodes"] or 1
    spread = f" on {nodes} {'emulated ' if row['emulate_nodes'] > 1 else ''}nodes" if nodes > 1 else ""
    return f"{row['world_size']} × {gpu}{spread}"
