"""What verification finds: failures, gaps that are stated, and the verdict on one run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One check of one record or file that does not hold."""

    place: str  # trial id, or the file below the run's directory
    check: str  # schema, figures, results.csv, tables, commit, ...
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.place}: {self.check}: found {self.found}; expected {self.expected}"


@dataclass(frozen=True, kw_only=True, slots=True)
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
    unchecked: list[str] = field(default_factory=list)  # sentences: what could not be looked up here
    compared: list[RowComparison] = field(default_factory=list)
    partnerless: list[str] = field(default_factory=list)  # rows that one of the two runs lacks

    @property
    def holds(self) -> bool:
        return not self.failures and all(one.passed for one in self.compared)
