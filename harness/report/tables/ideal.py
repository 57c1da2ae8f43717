"""Attention beside what it could reach: one GPU's time divided by the ranks, and what the link between nodes allows.

Three figures, of which only the last is a bound:

    ideal       the trial with cp_size 1 on one GPU ÷ ranks. Measured, in another trial: noise, clocks and neighbours
                differ, so a trial can come out a little ahead of it. The same on every GPU at once, where a run holds
                it, is what the GPUs reach together before anything is shared.
    reference   for forward and for backward the longer of the ideal and the needed bytes ÷ link. It holds what is
                measured in another trial, so it is a reference as well.
    link bound  needed bytes ÷ link, with compute for nothing. No step of a schedule of the engine is shorter, by
                construction (`engine.attention.comm_volume`): it needs no fewer bytes, and `link` is the
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.attention.comm_volume import InterNodeBytes, least_inter_node_bytes
from engine.attention.geometry.layout import Layout, SplitZigzag, layout_named
from engine.attention.masks import parse_mask
from engine.attention.problem import Problem
from engine.attention.resolve import balanced
from engine.settings import BYTES_OF
from harness.report.results import UPSTREAM, Row, setting_names
from harness.report.tables.table import Column, Table, number, significant, table_of, text
from harness.report.tables.trials import NAME, PARALLEL, TOKENS, TrialRow, lines_of
from harness.report.variants import pooled

GIB = 1 << 30
MOMENTS = ("before", "between", "after")  # the steps of a trial, when its link is measured

# What sharing the problem out may change; everything else must be equal for a trial to be the ideal of another.
_SHARING = frozenset({
    "method", "cp_size", "tp_size", "world_size", "layout", "schedule", "backward", "exchange", "grad_comm_dtype",
    "emulate_nodes", "seed",
})  # fmt: skip

NOTE = (
    "ideal = seconds of the trial with cp_size 1 on one GPU ÷ ranks; at once = the same on every GPU at the same time, "
    "the slowest. Both are measured, so that a trial may be faster than either"
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
    lines = [line for line in lines_of(attention) if _take_ideal(line, attention)]
    share = significant(3, 100)

    def ms(header: str, key: str) -> Column:
        return number(header, lambda line: 1e3 * line[key] if line.get(key) else None, significant(3))

    columns = (
        NAME, TOKENS, PARALLEL, number("nodes", "nodes"),
        ms("ms", "step_seconds_median"),
        ms("ideal ms", "ideal"), number("% of ideal", _reached("ideal"), share),
        ms("at once ms", "at_once"), number("% of at once", _reached("at_once"), share),
        number("needed GiB", "needed", significant(3)), text("needed by schedule, GiB", "by_schedule"),
        number("link GiB/s", "link", significant(3)), text("link measured", "link_source"),
        number("link spread %", "link_spread", significant(2, 100)),
        ms("link bound ms", "bound"), number("% of link bound", _reached("bound"), share),
        ms("reference ms", "reference"), number("% of reference", _reached("reference"), share),
    )  # fmt: skip
    told = {
        NOTE: True,
        LINK_NOTE: any("link" in line for line in lines),
        ROUNDS_NOTE: any(sum(map(bool, row.get("link_by_round", ()))) > 1 for row in attention),
        OTHER_KERNEL_NOTE: any(line["other_kernel"] for line in lines),
    }
    note = "; ".join(sentence for sentence, holds in told.items() if holds)
    return table_of("ideal", "Attention beside the ideal, forward and backward", columns, lines, note=note)


def _reached(bound: str) -> Callable[[TrialRow], float | None]:
    """The share of a bound or reference that the trial's time reaches."""
    return lambda line: line[bound] / line["step_seconds_median"] if line.get(bound) else None


def _take_ideal(line: TrialRow, attention: Sequence[Row]) -> bool:
    """Add to a line what its trial could reach, in seconds; whether the run says so."""
    whole = None if line["cp_size"] == 1 else _unshared(line.row, attention, 1)
    if not whole:
        return False
    ranks = line["world_size"]
    step, forward = (pooled(whole, f"{part}_seconds_median") for part in ("step", "forward"))
    together = pooled(_unshared(line.row, attention, ranks), "step_seconds_median")
    line.update(
        ideal=step / ranks if step else None,
        at_once=together / ranks if together else None,
        other_kernel=line.get("chosen_kernel") != whole[0].get("chosen_kernel"),
    )
    if trial := spanning_trial(line.row):
        line.update(
            needed=trial.gib(trial.needed),
            by_schedule=trial.by_schedule(),
            link=trial.link,
            link_source=trial.link_source,
            link_spread=trial.spread,
            bound=trial.seconds(trial.needed) if trial.bounded else None,
            reference=trial.reference(forward / ranks, (step - forward) / ranks) if step and forward else None,
        )
    return True


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
        mask = parse_mask(row["mask"])
        of_trial: dict[str, Layout] = {"split_zigzag": SplitZigzag(row["checkpoint.tail"]), "balanced": balanced(mask)}
        return least_inter_node_bytes(
            Problem(
                cp_size=row["cp_size"],
                node_size=ranks_per_node,
                heads=row["model.heads"],
                kv_heads=row["model.kv_heads"],
                mask=mask,
                layout=of_trial.get(name) or layout_named(name),
                seq_len=row["seq_len"],
                batch=row["batch_size"],
                head_dim=row["model.head_dim"],
                input_bytes=BYTES_OF[row["dtype"]],
            )
        )
    except ValueError:
        return {}
