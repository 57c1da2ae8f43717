"""Records in pairs of equal settings, and what is said of each pair: time, memory, loss, and whether it got worse.

A is the reference and B the candidate: ratios are B over A, so above 1 B takes longer or holds more.
"""

from __future__ import annotations

import glob
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.base.errors import UsageError, one_of
from harness.metrics.intervals import Interval, Ratio, TwoRounds
from harness.records.provenance import DIRTY
from harness.records.record import BadRecord, Record, RecordPlace, refuse_bad
from harness.records.stored import StoredRecord, StoredRun, read_all, resolved, runs_below, stored_run
from harness.report.results import Row, given_names, grouped, in_order, row_of, setting_names
from harness.report.speedup import Speedup, speedup
from harness.report.tables.agreement import has_own_weights, relative_differences
from harness.report.variants import setting_text

Outcome = Literal["compared", "lost", "gained", "neither"]
MemoryWord = Literal["less", "equal", "more"]
_MOST_HELD = 100  # trials of each side that are held against each other to find what differs
_MOVED_ASIDE = re.compile(r"\.\d{8}-\d{6}(-\d+)?")  # what `burst run` adds to the name of an earlier run
_STEPS = "steps."  # begins the names of settings that say how many steps are run, and how many of them are timed
_SHORT = 12  # characters of a commit in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRecord:
    """A record, the path of its run, where it is stored, and its row."""

    run: Path
    place: RecordPlace
    record: Record
    row: Row

    @property
    def settings(self) -> Row:
        """The settings of the trial by name, as far as they count in a comparison."""
        return {name: self.row[name] for name in setting_names(self.row) if _counts(name)}

    @property
    def groups(self) -> set[str]:
        """The names of settings that have members, such as `checkpoint`."""
        return {name.partition(".")[0] for name in self.settings if "." in name}


def of_directory(directory: Path) -> list[ComparedRecord]:
    """The records of a run, or of every run below a directory. Raises UsageError where there is none."""
    found = _read((run, one) for run in _runs(directory) for one in run.records())
    if not found:
        lacks = f"no record below {directory}" if directory.exists() else f"{directory} does not exist"
        raise UsageError(f"{lacks}; name a run, or a directory that holds runs")
    return found


def ever_kept(directories: Sequence[Path]) -> list[ComparedRecord]:
    """Records of all runs at or below `directories`, of their earlier attempts, and of runs moved aside from there."""
    runs: dict[Path, None] = {}
    for directory in directories:
        whole = directory.resolve()
        beside = whole.parent.glob(f"{glob.escape(whole.name)}.*")
        aside = sorted(path for path in beside if _MOVED_ASIDE.fullmatch(path.name.removeprefix(whole.name)))
        runs |= {resolved(run.path): None for place in (directory, *aside) for run in _runs(place)}
    found = _read((run, one) for run in map(stored_run, runs) for one in (*run.records(), *run.attempts()))
    if not found:
        places = ", ".join(map(str, directories))
        raise UsageError(f"no record below {places}; name runs, or directories that hold runs")
    return found


def of_commit(members: Sequence[ComparedRecord], prefix: str) -> list[ComparedRecord]:
    """The records of one commit, named by the start of its hash; with `-dirty` at the end, those of a changed tree.

    Raises UsageError where no commit or several begin so.
    """
    wanted, dirty = prefix.removesuffix(DIRTY), prefix.endswith(DIRTY)
    found = {
        member.record.commit
        for member in members
        if member.record.commit.startswith(wanted) and member.record.commit.endswith(DIRTY) == dirty
    }
    if len(found) != 1:
        known = sorted({_shortened(member.record.commit) for member in members if member.record.commit})
        if not found:
            raise UsageError(
                f"--commits {prefix}: no record is of it; these are of {one_of(known) if known else 'none'}"
            )
        several = one_of(sorted(map(_shortened, found)))
        raise UsageError(f"--commits {prefix}: several of these begin so: {several}; give more of one commit's hash")
    [commit] = found
    return [member for member in members if member.record.commit == commit]


def latest(members: Iterable[ComparedRecord]) -> ComparedRecord:
    """Of several records of one trial the one that started last."""
    return max(members, key=lambda member: (member.record.started_at, member.record.attempts, str(member.place)))


def of_same_steps(reference: Sequence[ComparedRecord], candidate: Sequence[ComparedRecord]) -> list[ComparedRecord]:
    """The candidates that hold a round of one of the references, wherever the two are stored: a copy of a run and its
    packed file are the same measurement."""
    known = {steps for member in reference for steps in _measured(member)}
    return [member for member in candidate if not known.isdisjoint(_measured(member))]


def _measured(member: ComparedRecord) -> set[tuple[str, str, str, tuple[float, ...]]]:
    """What tells each round with figures from every other one: its trial, commit, start and steps."""
    record = member.record
    rounds = [(one.started_at, one.step_seconds) for one in record.rounds]
    if not rounds:  # a record from before there were rounds
        rounds = [(record.started_at, steps) for steps in record.step_seconds_by_round]
    return {(record.trial_id, record.commit, started, tuple(steps)) for started, steps in rounds if steps}


def _runs(directory: Path) -> list[StoredRun]:
    return [stored_run(path) for path in runs_below(directory) or [directory]]


def _read(stored: Iterable[tuple[StoredRun, StoredRecord | BadRecord]]) -> list[ComparedRecord]:
    """Raises UsageError that lists every record that cannot be used."""
    members: list[ComparedRecord] = []
    bad: list[BadRecord] = []
    for run, one in stored:

        def use(found: StoredRecord, record: Record, run: StoredRun = run) -> None:
            members.append(ComparedRecord(run=run.path, place=found.place, record=record, row=row_of(record)))

        bad += read_all([one], use)
    refuse_bad(bad)
    return members


def _shortened(commit: str) -> str:
    return commit.removesuffix(DIRTY)[:_SHORT] + (DIRTY if commit.endswith(DIRTY) else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPair:
    """Two trials of equal settings."""

    reference: ComparedRecord
    candidate: ComparedRecord
    found: Speedup | None  # of the candidate; None unless both trials were measured

    @property
    def times(self) -> Ratio | None:
        """The ratio of the median steps."""
        return self.found.times if self.found else None

    @property
    def spread(self) -> Interval | TwoRounds | None:
        """Of that ratio."""
        return self.times.spread if self.times else None

    @property
    def paired(self) -> bool:
        """Whether rounds were drawn in pairs."""
        return self.found is not None and self.found.paired

    @property
    def apart(self) -> tuple[int, ...]:
        """Rounds of one run that the two ran on two machines: left out, or no pairs."""
        return self.found.apart if self.found else ()

    @property
    def later(self) -> bool:
        """Whether both have rounds of the same numbers of one run, of which one side ran later."""
        return self.found is not None and self.found.later

    @property
    def outcome(self) -> Outcome:
        """`lost`: measured in A and not in B; `gained`: the reverse; `neither`: in none of the two."""
        before, now = (member.record.status == "ok" for member in (self.reference, self.candidate))
        if before and now:
            return "compared"
        return "lost" if before else "gained" if now else "neither"

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

    def too_few_rounds(self, tolerance: float) -> bool:
        """Whether both have times, but too few rounds to say that B is slower or that it is not: without an interval
        only two rounds that agree say something."""
        times = self.times
        return times is not None and times.interval is None and times.verdict(tolerance) == "not distinguishable"

    @property
    def verdict(self) -> str:
        """In words for readers; empty without times. JSON keeps that of the ratio, on which scripts rely: `not
        distinguishable` there also stands for `not judged`."""
        if self.times is None:
            return ""
        return "not judged" if self.too_few_rounds(0.0) else self.times.verdict()

    def regression(self, tolerance: float) -> str:
        """What got worse by more than the tolerance, in words; empty where nothing did.

        Time counts with its whole interval, or with both of two rounds; a single round says nothing.
        """
        if self.outcome == "lost":
            record = self.candidate.record
            # Why a trial is wrong is told by itself, as it is of one without a partner.
            reason = f": {record.reason}" if record.reason and record.status != "wrong" else ""
            return f"no number in B ({record.status}{reason})"
        worse = []
        if self.times is not None and (word := self.times.verdict(tolerance)).startswith("slower"):
            worse.append(f"{word} ({self.times.value:.3f} × the time)")
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
    def not_judged(self) -> int:
        """How many pairs have too few rounds to judge their time."""
        return sum(pair.too_few_rounds(self.tolerance) for pair in self.pairs)

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
        ratios = [pair.times.value for pair in self.pairs if pair.times is not None]
        return statistics.geometric_mean(ratios) if ratios else None

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
        ranked = sorted(found, key=lambda item: (order.index(re.split("[ .]", item[0])[0]), item))
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
            if _counts(name) and not is_across(name, across)
        )
        return (member.run if one_run else None, member.record.experiment if experiments > 1 else None, settings)

    before, now = ({one: latest(found) for one, found in grouped(side, key).items()} for side in (reference, candidate))
    pairs = [
        TrialPair(
            reference=first, candidate=(second := now[key(first)]),
            found=speedup([second.row], [first.row], one_run=one_run),
        )
        for first in _ordered(member for one, member in before.items() if one in now)
    ]  # fmt: skip
    return Comparison(
        labels=labels,
        pairs=pairs,
        only_reference=_ordered(member for one, member in before.items() if one not in now),
        only_candidate=_ordered(member for one, member in now.items() if one not in before),
        tolerance=tolerance,
        across=tuple(across),
        one_run=one_run,
        repeated=len(reference) - len(before) + len(candidate) - len(now),
    )


def _ordered(members: Iterable[ComparedRecord]) -> list[ComparedRecord]:
    """In the order of tables."""
    places = {id(member.row): member for member in members}
    return [places[id(row)] for row in in_order(member.row for member in places.values())]


_FACTS = ("GPU", "devices", "driver", "software", "hosts", "launcher", "environment", "steps", "commit", "ran")


def _facts(member: ComparedRecord) -> dict[str, str]:
    """What may explain a difference besides the code, by name; the first word of a name is one of _FACTS.

    Steps make no other trial, but after a shorter warm-up, or later in a trial, they may take another time.
    """
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
        **{name: str(value) for name, value in row.items() if name.startswith(_STEPS)},
        "commit": record.commit,
        "ran": row["ran"] or "",
    }


def _counts(name: str) -> bool:
    """Whether a setting makes another trial: how many steps it took does not, nor which values were the planner's
    choice, since the values themselves are settings."""
    return name != "planned" and not name.startswith(_STEPS)


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
