"""Pairs of trials with equal settings, and what is said of each: time, memory, loss, and whether it got worse.

A is the reference and B the candidate: ratios are B over A, so above 1 B takes longer or holds more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.compare.sources import ComparedRecord, latest
from harness.metrics.intervals import Ratio
from harness.report.results import given_names, in_order, setting_names
from harness.report.speedup import compared
from harness.report.tables.agreement import has_own_weights, relative_differences
from harness.report.variants import setting_text

Outcome = Literal["compared", "lost", "gained", "neither"]
MemoryWord = Literal["less", "equal", "more"]
_MOST_HELD = 100  # trials of each side that are held against each other to find what differs


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPair:
    """Two trials of equal settings."""

    reference: ComparedRecord
    candidate: ComparedRecord
    times: Ratio | None  # of the median step; None unless both trials were measured
    paired: bool  # whether rounds were drawn in pairs
    apart: tuple[int, ...] = ()  # rounds of one run that the two ran on two machines: left out, or no pairs

    @property
    def outcome(self) -> Outcome:
        """`lost`: measured in A and not in B; `gained`: the reverse; `neither`: in none of the two."""
        before, now = (member.record.status == "ok" for member in (self.reference, self.candidate))
        if before and now:
            return "compared"
        return "lost" if before else "gained" if now else "neither"

    @property
    def rounds(self) -> tuple[int, int]:
        """Rounds that gave a figure, of A and of B."""
        return (self.reference.row["rounds"] or 0, self.candidate.row["rounds"] or 0)

    @property
    def memory_column(self) -> str | None:
        """The peak that both trials have: the GPU's, else the process's; None where they have none in common.

        Ranks that ran several trials, as in records until 2026-11-24, held memory of the ones before, so the peak of
        such a process says nothing.
        """
        shared = any(member.record.ranks_turn for member in (self.reference, self.candidate))
        for column in ("peak_memory_gib", *(() if shared else ("peak_rss_gib",))):
            if self.reference.row[column] and self.candidate.row[column]:
                return column
        return None

    @property
    def memory(self) -> float | None:
        """Ratio of the peaks, which are maxima: they have no interval."""
        column = self.memory_column
        return self.candidate.row[column] / self.reference.row[column] if column else None

    def memory_word(self, tolerance: float) -> MemoryWord | None:
        """Whether B holds less, more, or within the tolerance as much."""
        if self.memory is None:
            return None
        return "more" if self.memory > 1 + tolerance else "less" if self.memory < 1 - tolerance else "equal"

    @property
    def loss(self) -> float | None:
        """Largest relative difference of the losses over the steps both took; None unless both trained from the same
        initial weights."""
        ours, theirs = self.reference.row, self.candidate.row
        if ours["method"] != theirs["method"] and (has_own_weights(ours) or has_own_weights(theirs)):
            return None
        losses = [member.row["loss_by_step"] for member in (self.reference, self.candidate)]
        return max(relative_differences(*losses)) if all(losses) else None

    def regression(self, tolerance: float) -> str:
        """What got worse by more than the tolerance, in words; empty where nothing did.

        Time counts with its whole interval, so never with fewer than three rounds.
        """
        if self.outcome == "lost":
            record = self.candidate.record
            # Why a trial is wrong is told by itself, as it is of one without a partner.
            reason = f": {record.reason}" if record.reason and record.status != "wrong" else ""
            return f"no number in B ({record.status}{reason})"
        worse = []
        if self.times is not None and self.times.verdict(tolerance) == "slower":
            worse.append(f"slower ({self.times.value:.3f} × the time)")
        if self.memory is not None and self.memory_word(tolerance) == "more":
            worse.append(f"more memory ({100 * (self.memory - 1):+.1f}%)")
        return " and ".join(worse)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All pairs, in the order of tables, and the trials that have no partner."""

    labels: tuple[str, str]  # what A and B are
    pairs: list[TrialPair]
    only_reference: list[ComparedRecord]
    only_candidate: list[ComparedRecord]
    tolerance: float
    across: tuple[str, ...] = ()  # the settings in which the two of a pair may differ
    one_run: bool = False  # whether both sides are of the same runs
    repeated: int = 0  # records passed over, since a later one has the same settings

    @property
    def regressions(self) -> list[TrialPair]:
        return [pair for pair in self.pairs if pair.regression(self.tolerance)]

    @property
    def wrong(self) -> list[tuple[str, ComparedRecord]]:
        """The trials that compute something else, with or without a partner, each after its side."""
        sides = (
            ("A", [*(pair.reference for pair in self.pairs), *self.only_reference]),
            ("B", [*(pair.candidate for pair in self.pairs), *self.only_candidate]),
        )
        return [(side, one) for side, members in sides for one in members if one.record.status == "wrong"]

    @property
    def verdicts(self) -> Counter[str]:
        """How many pairs have each verdict."""
        return Counter(pair.times.verdict() for pair in self.pairs if pair.times is not None)

    @property
    def mean_ratio(self) -> float | None:
        """Geometric mean of the ratios of times."""
        logs = [math.log(pair.times.value) for pair in self.pairs if pair.times is not None]
        return math.exp(math.fsum(logs) / len(logs)) if logs else None

    def differences(self) -> list[tuple[str, str, str, int]]:
        """What else differs within measured pairs: (fact, in A, in B, pairs); hardware first.

        The commits too, since a comparison of directories may be one of commits or not.
        """
        found: Counter[tuple[str, str, str]] = Counter()
        for pair in self.pairs:
            if pair.outcome == "compared":
                before, now = _facts(pair.reference), _facts(pair.candidate)
                for name in dict.fromkeys((*before, *now)):
                    values = (before.get(name, ""), now.get(name, ""))
                    if values[0] != values[1]:
                        found[(name, *values)] += 1
        order = list(_FACTS)
        ranked = sorted(found, key=lambda item: (order.index(item[0].partition(" ")[0]), item))
        return [(*item, found[item]) for item in ranked]


def compare(
    labels: tuple[str, str],
    reference: Sequence[ComparedRecord],
    candidate: Sequence[ComparedRecord],
    *,
    tolerance: float,
    across: Sequence[str] = (),
    one_run: bool = False,
) -> Comparison:
    """Pair what has equal settings, whatever its steps and rounds; of several records with equal settings the latest.

    `across` names settings in which the two of a pair may differ, a group such as `checkpoint` with all its members.
    `one_run`: the two sides are of the same runs: what `settings: as_published` or `tuned` filled may differ too, pairs
    lie in one run, and their rounds are drawn in pairs where both ran in the same ones.
    """
    experiments = max(len({member.record.experiment for member in side}) for side in (reference, candidate))

    def key(member: ComparedRecord) -> tuple[Any, ...]:
        row = member.row
        settings = tuple(
            (name, row[name])
            for name in (given_names(row) if one_run else setting_names(row))
            if not name.startswith("steps.") and not is_across(name, across)
        )
        return (member.run if one_run else None, member.record.experiment if experiments > 1 else None, settings)

    before, now = _by_key(reference, key), _by_key(candidate, key)
    sides = ((before, now), (now, before))
    alone = [_ordered([found[one] for one in found if one not in other]) for found, other in sides]
    places = {id(member.row): member for member in before.values()}
    pairs = [
        _pair(places[id(row)], now[key(places[id(row)])], one_run)
        for row in in_order(member.row for one, member in before.items() if one in now)
    ]
    return Comparison(
        labels=labels,
        pairs=pairs,
        only_reference=alone[0],
        only_candidate=alone[1],
        tolerance=tolerance,
        across=tuple(across),
        one_run=one_run,
        repeated=len(reference) - len(before) + len(candidate) - len(now),
    )


def _by_key(
    members: Sequence[ComparedRecord], key: Callable[[ComparedRecord], tuple[Any, ...]]
) -> dict[tuple[Any, ...], ComparedRecord]:
    groups: dict[tuple[Any, ...], list[ComparedRecord]] = {}
    for member in members:
        groups.setdefault(key(member), []).append(member)
    return {one: latest(found) for one, found in groups.items()}


def _ordered(members: Sequence[ComparedRecord]) -> list[ComparedRecord]:
    places = {id(member.row): member for member in members}
    return [places[id(row)] for row in in_order(member.row for member in members)]


def _pair(reference: ComparedRecord, candidate: ComparedRecord, one_run: bool) -> TrialPair:
    found = compared([candidate.row], [reference.row], one_run=one_run)
    if found is None:
        return TrialPair(reference=reference, candidate=candidate, times=None, paired=False)
    return TrialPair(
        reference=reference, candidate=candidate, times=found.times, paired=found.paired, apart=found.apart
    )


_FACTS = ("GPU", "devices", "driver", "software", "hosts", "launcher", "environment", "commit", "ran")


def _facts(member: ComparedRecord) -> dict[str, str]:
    """What may explain a difference besides the code, by name; the first word of a name is one of _FACTS."""
    record, row = member.record, member.row
    software = record.measurement.software if record.measurement else {}
    return {
        "GPU": record.gpu,
        "devices": row["gpus"] or "",
        "driver": software.get("driver", ""),
        **{f"software {name}": version for name, version in software.items() if name != "driver"},
        "hosts": ", ".join(sorted(set(record.hosts))),
        "launcher": record.launcher,
        **{f"environment {name}": value for name, value in record.environment.items()},
        "commit": record.commit,
        "ran": row["ran"] or "",
    }


def is_across(name: str, across: Sequence[str]) -> bool:
    """Whether a setting is one of `across`, or a member of a group that is."""
    return any(name == one or name.startswith(f"{one}.") for one in across)


def values_of(member: ComparedRecord, across: Sequence[str]) -> str:
    """The values of the settings `across` in words: `dtype bf16, checkpoint.kind full`."""
    return ", ".join(setting_text(name, value) for name, value in member.settings.items() if is_across(name, across))


def differing(one: ComparedRecord, other: ComparedRecord) -> set[str]:
    """The settings in which two trials differ."""
    return {
        name for name in {*one.settings, *other.settings} if one.settings.get(name) != other.settings.get(name)
    }  # fmt: skip


def closest(
    reference: Sequence[ComparedRecord], candidate: Sequence[ComparedRecord]
) -> tuple[ComparedRecord, ComparedRecord]:
    """The two of both sides that differ in the fewest settings."""
    sides = (reference[:_MOST_HELD], candidate[:_MOST_HELD])
    return min(((one, other) for one in sides[0] for other in sides[1]), key=lambda two: len(differing(*two)))
