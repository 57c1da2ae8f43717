"""The sentences above a report's tables: the findings, whether the losses agree, and how the trials ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.metrics.intervals import ROUNDS_FOR_INTERVAL
from harness.report.findings import findings
from harness.report.results import Row
from harness.report.speedup import contested_points
from harness.report.tables.agreement import LIMIT, Agreement, agreements, own_weights_sentence
from harness.report.tables.trials import CHECKED, CPU_TIMES
from harness.report.variants import on_cpu
from harness.report.weak_forms import weak_forms, weak_sentence

MOST_WRONG = 8  # trials that a report names above its findings

TOO_FEW_ROUNDS = (
    "No trial ran in three rounds, so no figure has an interval and no difference can be told from noise; "
    "steps.rounds: 3 gives intervals."
)


def summary_sentences(rows: Sequence[Row]) -> list[str]:
    """Where trials disagree; the findings, the most telling first; whether the losses agree; how the trials ended.

    Trials on a CPU show agreement alone: no method is called faster there, and a sentence says why.
    """
    if not rows:
        return ["No trial was recorded."]
    found = findings([row for row in rows if not on_cpu(row)])
    measured = [row for row in rows if row["status"] == "ok" and not on_cpu(row)]
    if sentence := weak_sentence(weak_forms(rows).values()):
        found.append(sentence)
    if found and len(measured) > 1 and all(row["rounds"] < ROUNDS_FOR_INTERVAL for row in measured):
        found.append(TOO_FEW_ROUNDS)
    if contested_points([row for row in rows if on_cpu(row)]):
        found.append(CPU_TIMES)
    compared = [pair for pair in agreements(rows) if pair.row is not pair.reference]
    foreign = own_weights_sentence(rows)
    agreement = _agreement_sentences(compared, same_weights=bool(foreign)) + ([foreign] if foreign else [])
    if agreement and any(row["status"] == "wrong" for row in rows):
        agreement[0] = f"Without the wrong trials: {agreement[0]}"
    disagree = any(pair.agrees is False for pair in compared)
    agreement += _accuracy_sentence(rows)
    return [*(agreement + found if disagree else found + agreement), _how_they_ended(rows)]


def wrong_sentences(rows: Sequence[Row]) -> list[str]:
    """What trials compute wrongly, one sentence each, to be read before any figure; none where all are right."""
    wrong = [row for row in rows if row["status"] == "wrong"]
    told = [f"{row['trial_id']} is wrong and counts for nothing here: {row['reason']}." for row in wrong[:MOST_WRONG]]
    return told + ([f"{len(wrong) - MOST_WRONG} more are wrong; the tables have them."] if wrong[MOST_WRONG:] else [])


def _how_they_ended(rows: Sequence[Row]) -> str:
    counts = Counter(row["status"] for row in rows)
    others = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()) if status != "ok")
    trials = "trial" if len(rows) == 1 else "trials"
    return f"{counts['ok']} of {len(rows)} {trials} gave a measurement" + (f"; {others}." if others else ".")


def _agreement_sentences(compared: Sequence[Agreement], *, same_weights: bool) -> list[str]:
    """`same_weights`: the run also holds trials that start from other weights, so it is said which are meant."""
    trials = " of trials with the same initial weights, data and seed" if same_weights else ""
    bound = [pair for pair in compared if pair.agrees is not None]
    loose = [pair for pair in compared if pair.agrees is None]
    sentences = []
    if bound:
        apart = [pair for pair in bound if not pair.agrees]
        worst = max(max(pair.loss, pair.grad_norm or 0.0) for pair in bound)
        verdict = (
            f"{len(apart)} of {len(bound)} trials differ from their reference by more than {LIMIT:.0e}"
            if apart
            else f"Losses and gradient norms{trials} agree within {LIMIT:.0e} between {_what_varies(bound)}"
        )
        sentences.append(f"{verdict} (largest relative difference {f'{worst:.1e}' if worst else '0'}).")
    if loose:
        worst = max(pair.loss for pair in loose)
        types = " and ".join(sorted({pair.row["dtype"] for pair in loose}))
        sentences.append(f"In {types} the losses{trials} differ by at most {worst:.1e} relative.")
    return sentences


def _accuracy_sentence(rows: Sequence[Row]) -> list[str]:
    """How far attention and its gradients are from a dense float64 run, where the workers measured it."""
    worst: dict[str, float] = {}
    measured = [row for row in rows if row["status"] == "ok" and row["task"] == "attention"]
    checked = 0
    for row in measured:
        errors = [row[f"extra_error.{tensor}"] for tensor in CHECKED if row.get(f"extra_error.{tensor}") is not None]
        if errors:
            checked += 1
            worst[row["dtype"]] = max(worst.get(row["dtype"], 0.0), *errors)
    if not worst:
        return []
    listed = " and ".join(f"{error:.1e} in {dtype}" for dtype, error in sorted(worst.items()))
    some = f", in the {checked} of {len(measured)} trials that were compared" if checked < len(measured) else ""
    return [f"Attention and its gradients differ from a dense float64 run by at most {listed}, relative{some}."]


def _what_varies(pairs: Sequence[Agreement]) -> str:
    """What the trials that agree differ in."""
    methods = any(pair.row["method"] != pair.reference["method"] for pair in pairs)
    sizes = any(
        pair.row[size] != pair.reference[size] for pair in pairs for size in ("cp_size", "tp_size", "world_size")
    )
    varied = [word for word, varies in (("methods", methods), ("parallel sizes", sizes)) if varies]
    return f"all {' and '.join(varied)}" if varied else "all trials"
