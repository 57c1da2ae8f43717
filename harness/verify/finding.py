"""What verification finds: failures, gaps that are stated, and the verdict on one run, as lines of text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cluster.files.errors import counted
from engine.reader import to_json


@dataclass(frozen=True, slots=True)
class Failure:
    """One check of one record or file that does not hold."""

    place: str  # trial id, or the file below the run's directory
    check: str  # schema, figures, results.csv, tables, commit, ...
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.place}: {self.check}: found {self.found}; expected {self.expected}"


@dataclass(frozen=True, slots=True)
class Gap:
    """What a record cannot show, with the reason that tables repeat: no failure."""

    place: str
    check: str
    says: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RowComparison:
    """One row beside the same row of a reference run."""

    trial_id: str
    quantity: str  # status, gpu, step time, peak memory, loss
    found: str
    reference: str
    passed: bool
    note: str = ""  # the ratio with its interval

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        word = "pass" if self.passed else "fail"
        return f"{word}: {self.trial_id}: {self.quantity}: {self.found} beside {self.reference}{note}"


@dataclass(kw_only=True, slots=True)
class RunVerification:
    """The verdict on one run."""

    run: str  # its folder as given, or below the directory that was
    records: int = 0
    files: int = 0  # results.csv, tables, figures and sums that were compared; a packed run may have none
    failures: list[Failure] = field(default_factory=list)
    stated: list[Gap] = field(default_factory=list)
    float64_unchecked: int = 0  # ok records of our engine that hold no errors against float64
    unchecked: list[str] = field(default_factory=list)  # sentences: what could not be looked up here
    compared: list[RowComparison] = field(default_factory=list)
    partnerless: list[str] = field(default_factory=list)  # rows that one of the two runs lacks

    @property
    def holds(self) -> bool:
        return not self.failures and all(one.passed for one in self.compared)


def lines(verdicts: Sequence[RunVerification]) -> Iterator[str]:
    """A line per failure and per row that was compared, stated gaps by their sentences, and a summary of each run."""
    several = len(verdicts) > 1
    for verdict in verdicts:
        start = f"{verdict.run}: " if several else ""
        yield from (f"{start}{one}" for one in verdict.failures)
        yield from (f"{start}{one}" for one in verdict.compared)
        yield from (f"{start}no partner: {one}" for one in verdict.partnerless)
    stated = Counter((gap.check, gap.says) for verdict in verdicts for gap in verdict.stated)
    for (check, says), count in stated.items():
        of = "planned trial" if check == "trials" else "record"
        yield f"stated: {check}, {counted(count, of)}: {says}"
    yield from dict.fromkeys(f"not checked: {sentence}" for verdict in verdicts for sentence in verdict.unchecked)
    for verdict in verdicts:
        yield f"{verdict.run}: {_summary(verdict)}"
    if several:
        wrong = sum(not verdict.holds for verdict in verdicts)
        yield f"{len(verdicts)} runs: {'all hold' if not wrong else f'{wrong} do not hold'}"


def as_json(verdicts: Sequence[RunVerification]) -> dict[str, object]:
    """All verdicts as plain values."""
    return {
        "holds": all(verdict.holds for verdict in verdicts),
        "runs": [{"holds": verdict.holds, **to_json(verdict)} for verdict in verdicts],
    }


def _summary(verdict: RunVerification) -> str:
    parts = [counted(verdict.records, "record"), *([counted(verdict.files, "file")] if verdict.files else [])]
    if verdict.compared:
        passed = sum(one.passed for one in verdict.compared)
        parts.append(f"{passed} of {len(verdict.compared)} comparisons with the reference pass")
    parts.append(counted(len(verdict.failures), "failure") if verdict.failures else "all checks hold")
    if verdict.float64_unchecked:
        parts.append(f"{counted(verdict.float64_unchecked, 'record')} not checked against float64")
    if verdict.stated:
        parts.append(f"{counted(len(verdict.stated), 'gap')} stated")
    return ", ".join(parts)
