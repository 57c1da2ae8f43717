"""The claims of the papers with a verdict each, and statements on what the published sheets show.

Words come from results/paper/claims.yaml, numbers and verdicts from code: `checks` for claims, this module for the
statements, which need the published numbers alone. One function judges every claim.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from cluster.files.reader import load
from harness.base.errors import nearest
from harness.predict.published import ARTIFACT, MEMORY, SPEED, only, published_rows
from harness.records.record import RecordPlace
from harness.report.results import Row
from harness.report.tables.table import Column, Table, to_markdown
from harness.reproduce.audit import recomputed_rows, slips
from harness.reproduce.checks import (
    CHECKS,
    CUMULATIVE,
    ClaimedNumber,
    Factors,
    ablation,
    sheet_best,
    sheet_row,
    too_far,
)
from harness.reproduce.comparison import VERDICTS, Verdict
from harness.spec.references import PAPER_DIR

CLAIMS_FILE = "claims.yaml"


def _known(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name}; {nearest(name, known)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One claim as claims.yaml has it."""

    claim: str
    said_in: str
    check: str
    row: dict[str, str | int] = field(default_factory=dict)  # columns of the published number; "": an empty cell
    value: float | None = None  # where no row holds it
    setup: ClaimedNumber = field(default_factory=ClaimedNumber)  # model, gpus and seq_len, where no row holds them

    def __post_init__(self) -> None:
        _known("check", self.check, CHECKS)

    def claimed(self) -> ClaimedNumber:
        """The published number with its set-up. Raises LookupError where no row, or several numbers, match."""
        if not self.row:
            return replace(self.setup, value=self.value)
        rows = [row for row in published_rows() if row.experiment == "headline_claims"]
        row = only(rows, **self.row)
        return ClaimedNumber(value=row.value, model=row.model, gpus=row.gpus, seq_len=row.seq_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A sentence on the published sheets, and the name of the code that computes its numbers."""

    check: str
    says: str

    def __post_init__(self) -> None:
        _known("check", self.check, STATEMENTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Claims:
    """What the file holds."""

    partly_within: Factors
    claims: dict[str, Claim]
    words: dict[str, dict[str, str]]  # by check, then by verdict
    statements: dict[str, Statement]

    def __post_init__(self) -> None:
        for check, words in self.words.items():
            _known("check", check, CHECKS)
            for verdict in words:
                _known("verdict", verdict, VERDICTS)


@cache
def claims() -> Claims:
    """The claims of the repository."""
    return read_claims(PAPER_DIR / CLAIMS_FILE)


def read_claims(path: Path) -> Claims:
    """Raises UsageError with file and line for an unknown check or verdict and for what is no claim."""
    return load(Claims, path, "file of claims")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedClaim:
    """A claim with what we say of it."""

    name: str
    claim: str
    said_in: str
    verdict: Verdict
    why: str
    records: tuple[RecordPlace, ...]


def judged(rows: Sequence[tuple[Row, RecordPlace]]) -> list[JudgedClaim]:
    """Every claim with its verdict, from rows of ours with the places of their records."""
    held, trials = claims(), [row for row, _ in rows]
    places = {id(row): place for row, place in rows}
    found = []
    for name, claim in held.claims.items():
        claimed = claim.claimed()
        evidence = CHECKS[claim.check](claimed, trials)
        numbers = {"value": claimed.value} | dict(evidence.numbers)
        verdict, why = evidence.verdict, held.words[claim.check][evidence.verdict].format(**numbers)
        if verdict in ("partly", "not") and (far := too_far(evidence, claimed, held.partly_within)):
            verdict, why = "not comparable", f"{why} {far}"
        found.append(
            JudgedClaim(
                name=name,
                claim=claim.claim.format(**numbers),
                said_in=claim.said_in,
                verdict=verdict,
                why=why,
                records=tuple(places[id(row)] for row in evidence.trials),
            )
        )
    return found


def claims_table(found: Sequence[JudgedClaim]) -> Table:
    """A line for each claim."""
    within = claims().partly_within
    return Table(
        name="claims",
        title="Claims of the papers",
        columns=(
            Column(header="claim"), Column(header="said in"), Column(header="verdict"), Column(header="why"),
            Column(header="evidence"),
        ),
        rows=tuple(
            (one.claim, one.said_in, one.verdict, one.why, ", ".join(map(str, one.records)) or None)
            for one in found
        ),
        note="Verdicts follow from records, formulas and the published sheets. Reproduced: on the claimed set-up, or "
        f"by a formula. Partly: less of it, or with a sequence at most {within.seq_len:g} times shorter, a model at "
        f"most {within.model:g} times smaller and at most {within.gpus:g} times fewer GPUs. Not: our records "
        "contradict it on such a set-up. Not comparable: measured on a smaller set-up than that. Not run: no record of "
        "ours bears on it.",
    )  # fmt: skip


def claims_lines(found: Sequence[JudgedClaim]) -> list[str]:
    """The same table for a page of docs/, as lines of Markdown: its evidence is links to published runs."""
    table = claims_table(found)
    linked = ((*row[:-1], _links(one.records) or None) for row, one in zip(table.rows, found, strict=True))
    _title, _empty, *lines = to_markdown(replace(table, rows=tuple(linked))).splitlines()
    return lines


_PUBLISHED_RUN = re.compile(r"results/published/([\w-]+/[\w-]+)\.jsonl$")


def _links(records: Sequence[RecordPlace]) -> str:
    """Each published run behind a verdict once, linked from docs/."""
    runs = {match.group(1) for place in records if (match := _PUBLISHED_RUN.search(place.file.as_posix()))}
    return ", ".join(f"[{run}](../results/published/{run}.jsonl)" for run in sorted(runs))


# Statements on the sheets, each from published numbers alone.


def statements() -> dict[str, str]:
    """What the sheets show, as sentences by name."""
    return {
        name: one.says.format(**STATEMENTS[one.check]()) for name, one in claims().statements.items()
    }  # fmt: skip


def sources() -> dict[str, object]:
    rows = published_rows()
    derived = sum(row.derived for row in rows)
    return {"rows": len(rows) - derived, "derived": derived, "artifact": ARTIFACT}


def headline() -> dict[str, object]:
    """The headline row of 14B beside the rows of the ablation that keep all and half of the attention outputs."""
    whole, half = (ablation(SPEED, f"{CUMULATIVE} & {last}") for last in ("whole_ckpt", "sl_ckpt"))
    whole_gib = ablation(MEMORY, f"{CUMULATIVE} & whole_ckpt")
    shown = sheet_row(SPEED, "14b").number
    best = sheet_best(SPEED, "14b")
    noise = [deviation / speed for speed, deviation in _spreads()]
    apart = abs(shown / whole - 1)
    return {
        "headline": shown, "headline_gib": sheet_row(MEMORY, "14b").number, "whole": whole, "whole_gib": whole_gib,
        "half": half, "apart": apart, "half_apart": 1 - half / shown, "noise": statistics.median(noise),
        "most_noise": max(noise), "judgement": "within" if apart <= max(noise) else "not within",
        "best": best.method, "best_speed": best.number, "half_ratio": half / best.number,
        "headline_ratio": shown / best.number,
    }  # fmt: skip


def slip() -> dict[str, object]:
    """Published over recomputed, of the sheets' own figures: those of Megatron's fork have their own formula."""
    ratios = slips(one for one in recomputed_rows() if one.source != "megatron_fork_unlabelled")
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "count": len(ratios)}


def samples() -> dict[str, object]:
    speeds = [row for row in published_rows() if row.metric == SPEED and row.value is not None]
    spread = len(_spreads())
    return {"single": len(speeds) - spread, "total": len(speeds), "spread": spread}


STATEMENTS: Mapping[str, Callable[[], dict[str, object]]] = {
    "sources": sources, "headline": headline, "slip": slip, "samples": samples,
}  # fmt: skip


def _spreads() -> list[tuple[float, float]]:
    """Published speeds that have a standard deviation beside them: both, in pairs."""
    rows = [row for row in published_rows() if row.value is not None]
    speeds = {row.trial: row.number for row in rows if row.metric == SPEED}
    return [(speeds[row.trial], row.number) for row in rows if row.metric == f"{SPEED}_std" and row.trial in speeds]
