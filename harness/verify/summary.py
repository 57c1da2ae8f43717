"""A verdict as lines of text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from cluster.files.errors import counted
from engine.reader import to_json
from harness.verify.finding import RunVerification


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
        yield f"stated: {check}, {counted(count, 'record')}: {says}"
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
    if verdict.stated:
        parts.append(f"{counted(len(verdict.stated), 'gap')} stated")
    return ", ".join(parts)
