"""Attention beside what it could reach: one GPU's time divided by the ranks, and what the link between nodes allows.

Three figures, of which only the last is a bound:

    ideal       the trial with cp_size 1 on one GPU ÷ ranks. Measured, in another trial: noise, clocks and neighbours
                differ, so a trial can come out a little ahead of it. The same on every GPU at once, where a run holds
                it, is what the GPUs reach together before anything is shared.
    reference   for forward and for backward the longer of the ideal and the needed bytes ÷ link. It holds what is
                measured in another trial, so it is a reference as well.
    link bound  needed bytes ÷ link, with compute for nothing. No step of a schedule of the engine is shorter, by
                construction (`engine.attention.planning.inter_node`): it needs no fewer bytes, and `link` is the
                fastest of what was measured before, between and after the steps and of what the fastest step itself
                sent between nodes. A link that drifts makes the bound lower, never false. Each round is judged by its
                own link: the bound is the median over the steps of what each one's round allows.

A trial with a single measurement of the link, as records from before there were three have, gets the reference alone;
so does one whose bytes between nodes are not known, or are fewer than those called needed. All is formed from trials
of one run. Ranks on a CPU share its cores, so there is no ideal of theirs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.attention.geometry.layout import SplitZigzag, layout_named
from engine.attention.masks import parse_mask
from engine.attention.planning.inter_node import InterNodeBytes, SpanningProblem, least_inter_node_bytes
from engine.settings import BYTES_OF
from harness.base.lengths import format_length
from harness.report.results import UPSTREAM, Row, setting_names
from harness.report.tables.table import Column, Table, significant, without_empty_columns
from harness.report.tables.trials import series_names
from harness.report.variants import panel_name, panel_of, pooled

GIB = 1 << 30
MOMENTS = ("before", "between", "after")  # the steps of a trial, when its link is measured

# What sharing the problem out may change; everything else must be equal for a trial to be the ideal of another.
_SHARING = frozenset({
    "method", "cp_size", "tp_size", "world_size", "layout", "schedule", "backward", "exchange", "grad_comm_dtype",
    "emulate_nodes", "between_nodes", "seed",
})  # fmt: skip

NOTE = (
    "ideal = seconds of the trial with cp_size 1 on one GPU ÷ ranks; at once = the same on every GPU at the same time, "
    "the slowest: both are measured references, no bounds"
)
OTHER_KERNEL_NOTE = (
    "a compared system whose kernel ran no trial on one GPU is put beside the ideal of the engine's kernel"
)
LINK_NOTE = (
    "needed = bytes that mask, layout, heads and dtype make the node that sends most send to others, per rank, under "
    "the schedule with the fewest, beside it forward + backward of every schedule that can run; link = the fastest of "
    "the measurements in the trial and of what its fastest step sent between nodes; link bound = needed ÷ link, never "
    "exceeded by construction; reference = for forward and for backward the longer of the ideal and needed ÷ link. A "
    "row without a link bound has a reference only: its link was measured once, its bytes between nodes are not known, "
    "or it sent fewer than are needed by the engine's schedules"
)

ROUNDS_NOTE = "with several rounds a step's link is that of its round, and link the median over the steps"


def ideal_table(rows: Sequence[Row]) -> Table | None:
    """Percentage of the ideal, of the reference and of the link's bound that shared attention reaches; None without a
    cp_size of 1."""
    attention = [row for row in rows if row["task"] == "attention" and row["status"] == "ok" and row["gpu"] != "cpu"]
    names = series_names(attention)
    lines, other_kernel = [], False
    for row, name in zip(attention, names, strict=True):
        whole = None if row["cp_size"] == 1 else _unshared(row, attention, 1)
        if not whole:
            continue
        other_kernel |= row.get("chosen_kernel") != whole[0].get("chosen_kernel")
        seconds = {column: pooled(whole, column) for column in ("step_seconds_median", "forward_seconds_median")}
        ideal = seconds["step_seconds_median"] / row["world_size"] if seconds["step_seconds_median"] else None
        together = pooled(_unshared(row, attention, row["world_size"]), "step_seconds_median")
        at_once = together / row["world_size"] if together else None
        step = row["step_seconds_median"]
        lines.append(
            (
                name,
                row["seq_len"],
                panel_name(panel_of(row)),
                row["nodes"],
                1e3 * step,
                1e3 * ideal if ideal else None,
                ideal / step if ideal else None,
                1e3 * at_once if at_once else None,
                at_once / step if at_once else None,
                *_link_cells(row, seconds),
            )
        )
    if not lines:
        return None
    columns = (
        Column(header="method"),
        Column(header="tokens", form=format_length, numeric=True),
        Column(header="parallel"),
        Column(header="nodes", numeric=True),
        Column(header="ms", form=significant(3), numeric=True),
        Column(header="ideal ms", form=significant(3), numeric=True),
        Column(header="% of ideal", form=significant(3, 100), numeric=True),
        Column(header="at once ms", form=significant(3), numeric=True),
        Column(header="% of at once", form=significant(3, 100), numeric=True),
        Column(header="needed GiB", form=significant(3), numeric=True),
        Column(header="needed by schedule, GiB"),
        Column(header="link GiB/s", form=significant(3), numeric=True),
        Column(header="link measured"),
        Column(header="link spread %", form=significant(2, 100), numeric=True),
        Column(header="link bound ms", form=significant(3), numeric=True),
        Column(header="% of link bound", form=significant(3, 100), numeric=True),
        Column(header="reference ms", form=significant(3), numeric=True),
        Column(header="% of reference", form=significant(3, 100), numeric=True),
    )
    spans = any(value is not None for line in lines for value in line[9:])
    by_round = any(sum(map(bool, row.get("link_by_round", ()))) > 1 for row in attention)
    notes = [NOTE]
    if spans:
        notes.append(LINK_NOTE)
    if by_round:
        notes.append(ROUNDS_NOTE)
    if other_kernel:
        notes.append(OTHER_KERNEL_NOTE)
    return without_empty_columns(
        Table(
            name="ideal", title="Attention beside the ideal, forward and backward", columns=columns, rows=tuple(lines),
            note="; ".join(notes),
        )
    )  # fmt: skip


def share_of_ideal(row: Row, rows: Sequence[Row]) -> float | None:
    """Ideal seconds of shared attention over its own; None without the trial of `rows` that gives the ideal."""
    if row["task"] != "attention" or row["cp_size"] == 1 or row["gpu"] == "cpu" or not row["step_seconds_median"]:
        return None
    seconds = pooled(_unshared(row, rows, 1), "step_seconds_median")
    return seconds / row["world_size"] / row["step_seconds_median"] if seconds else None


def _unshared(row: Row, rows: Sequence[Row], ranks: int) -> list[Row]:
    """Trials of the row's problem with cp_size 1, by so many ranks at once, each on all of it; by the row's kernel. A
    compared system whose kernel has no such trial is held against the one that the engine took."""
    problem = _problem(row)
    same = [
        other
        for other in rows
        if (other["task"], other["seq_len"], other["cp_size"], other["world_size"])
        == ("attention", row["seq_len"], 1, ranks)
        and _problem(other) == problem
    ]
    own = [other for other in same if other.get("chosen_kernel") == row.get("chosen_kernel")]
    return own if own or not row["method"].endswith(UPSTREAM) else same


def _problem(row: Row) -> tuple[Any, ...]:
    """Key of trials that compute the same attention, in one run."""
    settings = tuple((name, row[name]) for name in setting_names(row) if name not in _SHARING)
    return (row["run"], row["experiment"], settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOnLink:
    """The link as one round found it. Of several rounds whose link was measured in the last alone, all of them."""

    measured: Mapping[str, float]  # GiB per second and rank, by moment
    own: float | None  # the same that the fastest step sent at least; None if its bytes are not known
    steps: int

    @property
    def link(self) -> float:
        """GiB per second and rank, the fastest that was seen."""
        return max(*self.measured.values(), self.own or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanningTrial:
    """A trial whose ranks are on several nodes: what it had to send between them, and how fast that could go."""

    least: Mapping[str, InterNodeBytes]  # by schedule, fewest bytes first, of the node that sends most
    ranks: int  # of a node
    sent: int | None  # bytes that the node that sends most sent in a step, no more than it did; None if unknown
    rounds: tuple[RoundOnLink, ...]

    @property
    def needed(self) -> int:
        """Bytes of the schedule that sends fewest."""
        return next(iter(self.least.values())).total

    @property
    def link(self) -> float:
        """GiB per second and rank whose time for a GiB is the median, over all steps, of that of each one's round.

        No step of a round is shorter than its round's link allows, so no median of steps is below this median.
        """
        return 1 / statistics.median(1 / each.link for each in self.rounds for _ in range(each.steps))

    @property
    def link_source(self) -> str:
        """How often the link was measured, and which measurement was the fastest."""
        measured = [pair for each in self.rounds for pair in each.measured.items()]
        moment, _ = max(measured, key=lambda pair: pair[1])
        count = "once" if len(measured) == 1 else f"{len(self.rounds[0].measured)} times"
        if len(self.rounds) > 1:
            count = f"{count} in each of {len(self.rounds)} rounds"
        if any(each.own and each.own > max(each.measured.values()) for each in self.rounds):
            return f"{count}; its own steps were faster"
        return f"{count}, {moment} the steps" if len(measured) == 1 else f"{count}, fastest {moment}"

    @property
    def spread(self) -> float | None:
        """By how much the slowest measurement is below the fastest, as a fraction; None with a single one."""
        measured = [speed for each in self.rounds for speed in each.measured.values()]
        return None if len(measured) == 1 else 1 - min(measured) / max(measured)

    @property
    def bounded(self) -> bool:
        """Whether needed bytes ÷ link is a bound by construction: see the module's text."""
        measured = all(each.measured.keys() == set(MOMENTS) for each in self.rounds)
        return measured and self.sent is not None and self.sent >= self.needed

    def seconds(self, nbytes: float) -> float:
        """Of the link, for so many bytes of a node."""
        return nbytes / self.ranks / GIB / self.link

    def reference(self, forward: float, backward: float) -> float:
        """Seconds of the schedule that comes nearest to these of a forward and a backward without any transfer."""
        return min(
            max(forward, self.seconds(each.forward)) + max(backward, self.seconds(each.backward))
            for each in self.least.values()
        )

    def gib(self, nbytes: float) -> float:
        """GiB per rank, of bytes of a node."""
        return nbytes / self.ranks / GIB

    def by_schedule(self) -> str:
        """GiB per rank of forward + backward by schedule, those that need equally many together."""
        form, names = significant(2), dict[tuple[int, int], list[str]]()
        for name, each in self.least.items():
            names.setdefault((each.forward, each.backward), []).append(name.replace("_", " "))
        return "; ".join(
            f"{', '.join(alike)} {' + '.join(form(self.gib(part)) for part in parts)}" for parts, alike in names.items()
        )


def spanning_trial(row: Row) -> SpanningTrial | None:
    """What is known of the link of a trial of task attention; None on one node or unequal ones, or without a figure."""
    found = {moment: row.get(f"extra_link_gib_per_second.{moment}") for moment in MOMENTS}
    if not any(found.values()):  # a record from before the link was measured three times
        found = {"after": row.get("extra_across_gib_per_second")}
    known = _speeds(found)
    nodes, world, size = row["nodes"] or 1, row["world_size"], row["cp_size"]
    if not known or nodes < 2 or world % nodes or size % (ranks := world // nodes) or size == ranks:
        return None
    least = _least(row, ranks)
    if not least:
        return None
    ran = least.get(row.get("chosen_schedule") or "")
    sent = ran.total if ran else None
    if counted := row.get("extra_computed_sent_between_nodes_bytes"):  # a list, in a row as JSON
        by_rank = json.loads(counted)
        sent = max(sum(by_rank[first : first + ranks]) for first in range(0, world, ranks))
    steps_by_round = row["step_seconds_by_round"]
    speeds = [_speeds(each) for each in row.get("link_by_round", ())]
    if not speeds or not all(speeds):  # records that hold the link of the last round alone
        speeds, steps_by_round = [known], [[seconds for steps in steps_by_round for seconds in steps]]
    rounds = tuple(
        RoundOnLink(measured=measured, own=sent / ranks / GIB / min(steps) if sent else None, steps=len(steps))
        for measured, steps in zip(speeds, steps_by_round, strict=True)
    )
    return SpanningTrial(least=least, ranks=ranks, sent=sent, rounds=rounds)


def _speeds(found: Mapping[str, Any]) -> dict[str, float]:
    """The measurements by moment, without what is no speed."""
    return {moment: speed for moment, speed in found.items() if isinstance(speed, int | float) and speed > 0}


def _least(row: Row, ranks_per_node: int) -> Mapping[str, InterNodeBytes]:
    """Bytes that each schedule sends between nodes at least, for the problem of a trial; empty where the mask has more
    tiles under this layout than can be counted."""
    name = row.get("chosen_layout") or row["layout"]
    try:
        return least_inter_node_bytes(
            SpanningProblem(
                cp_size=row["cp_size"],
                node_size=ranks_per_node,
                heads=row["model.heads"],
                kv_heads=row["model.kv_heads"],
                mask=parse_mask(row["mask"]),
                layout=SplitZigzag(row["checkpoint.tail"]) if name == "split_zigzag" else layout_named(name),
                seq_len=row["seq_len"],
                batch=row["batch_size"],
                head_dim=row["model.head_dim"],
                input_bytes=BYTES_OF[row["dtype"]],
            )
        )
    except ValueError:
        return {}


def _link_cells(row: Row, whole: Mapping[str, float | None]) -> tuple[Any, ...]:
    """The columns from `needed GiB` on; `whole` are the seconds of the trial with cp_size 1."""
    trial = spanning_trial(row)
    if trial is None:
        return (None,) * 9
    median, step, forward = (
        row["step_seconds_median"], whole["step_seconds_median"], whole["forward_seconds_median"]
    )  # fmt: skip
    reference = None
    if step and forward:
        reference = trial.reference(forward / row["world_size"], (step - forward) / row["world_size"])
    bound = trial.seconds(trial.needed) if trial.bounded else None
    return (
        trial.gib(trial.needed),
        trial.by_schedule(),
        trial.link,
        trial.link_source,
        trial.spread,
        1e3 * bound if bound is not None else None,
        bound / median if bound is not None else None,
        1e3 * reference if reference else None,
        reference / median if reference else None,
    )
