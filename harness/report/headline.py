"""What the first screen of a report says: a verdict of one or two sentences, and short notes on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.metrics.intervals import ROUNDS_FOR_INTERVAL
from harness.report.digits import ratio_text
from harness.report.rankings import SizeRanking, rankings_of, verdict_sentence
from harness.report.results import Row, grouped
from harness.report.speedup import contested_points, slow_baselines, slow_sentence
from harness.report.tables.agreement import LIMIT, LossDifferences, compared_of, own_weights_sentence
from harness.report.tables.ideal import share_of_ideal
from harness.report.tables.trials import CPU_TIMES, errors_of
from harness.report.variants import first_kernel, footnotes_of, kernel_in_words, on_cpu

MOST_WRONG = 8  # trials that a report names above its verdict

TOO_FEW_ROUNDS = (
    "No trial ran in three rounds, so no figure has an interval and no difference can be told from noise; "
    "steps.rounds: 3 gives intervals."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Headline:
    """The first screen of a report in words. `place` says where the verdict holds; `rankings` are all sizes on GPUs."""

    verdict: str
    place: str
    notes: list[str]
    footnotes: list[str]  # what short names leave out
    rankings: list[SizeRanking]

    @property
    def sentences(self) -> list[str]:
        """Verdict and notes."""
        return [self.verdict, *self.notes]


def headline_of(rows: Sequence[Row], baseline: str | None = None) -> Headline:
    """Where trials disagree, that; else who is faster at the largest size on GPUs; else whether the trials agree, since
    times on a CPU tell nothing about GPUs."""
    if not rows:
        return Headline(verdict="No trial was recorded.", place="", notes=[], footnotes=[], rankings=[])
    rankings = rankings_of(rows, baseline)
    compared = compared_of(rows)
    agreement = [*_agreement_sentences(compared), *_accuracy_sentence(rows)]
    disagree = any(pair.agrees is False for pair in compared)
    faster = [verdict_sentence(rankings[0]), *_same_kernel(rankings[0])] if rankings else []
    notes = _notes(rows, rankings)
    ended = _how_they_ended(rows)
    told = [*agreement, *faster] if disagree or not faster else [*faster, *agreement]
    first = 2 if told and told[0] in faster and len(faster) > 1 else 1
    verdict = " ".join(told[:first]) or ended
    return Headline(
        verdict=verdict,
        place=_place(rankings[0], rows) if rankings and not disagree else "",
        notes=[*told[first:], *notes, *([ended] if ended != verdict else [])],
        footnotes=footnotes_of(rankings[0].rows) if rankings else [],
        rankings=rankings,
    )


def wrong_sentences(rows: Sequence[Row]) -> list[str]:
    """What trials compute wrongly, one sentence each, to be read before any figure; none where all are right."""
    wrong = [row for row in rows if row["status"] == "wrong"]
    told = [f"{row['trial_id']} is wrong and counts for nothing here: {row['reason']}." for row in wrong[:MOST_WRONG]]
    return told + ([f"{len(wrong) - MOST_WRONG} more are wrong; the tables have them."] if wrong[MOST_WRONG:] else [])


def _place(ranking: SizeRanking, rows: Sequence[Row]) -> str:
    """Where the verdict holds, and what share of the possible its subject reaches."""
    subject = ranking.subject
    parts = [ranking.place]
    ideal = share_of_ideal(subject.rows[0], rows)
    utilisation, ceiling = subject.of("mfu"), subject.of("mfu_ceiling")
    ranks = subject.rows[0]["world_size"]
    if ideal is not None and ideal * ranks < 1:
        parts.append(f"one GPU alone is {1 / (ideal * ranks):.2f} times as fast as {subject.short}")
    elif ideal is not None:
        parts.append(f"{subject.short} reaches {100 * ideal:.0f}% of one GPU's time ÷ {ranks}")
    elif utilisation is not None and ceiling:
        parts.append(f"{subject.short} reaches {100 * utilisation / ceiling:.0f}% of what the kernels allow")
    return "; ".join(parts)


def _same_kernel(ranking: SizeRanking) -> list[str]:
    """Where the two of the verdict ran different attention kernels: the ratio with the other's, if it was measured."""
    subject, other = ranking.subject, ranking.other
    if other is None or not ranking.of_methods:
        return []
    ours, theirs = (str(one.rows[0].get("chosen_kernel") or "") for one in (subject, other))
    words = [kernel_in_words(kernel) for kernel in (ours, theirs)]
    if not all(words) or first_kernel(ours) == first_kernel(theirs):
        return []
    for series in ranking.compared:
        if series.method == subject.method and series.rows[0].get("chosen_kernel") == first_kernel(theirs):
            found = ranking.between(series, other).beside(other)
            if found is not None:
                between = f" ({found.between})" if found.spread else " (one round)"
                kernel = kernel_in_words(first_kernel(theirs))
                return [f"With {kernel} in both, {ratio_text(found.ratio)} times{between}."]
    return [f"Their attention kernels differ: {words[0]} and {words[1]}."]


def _notes(rows: Sequence[Row], rankings: Sequence[SizeRanking]) -> list[str]:
    measured = [row for row in rows if row["status"] == "ok" and not on_cpu(row)]
    notes = [slow_sentence(slow_baselines(rows).values()), own_weights_sentence(rows)]
    if rankings and len(measured) > 1 and all(row["rounds"] < ROUNDS_FOR_INTERVAL for row in measured):
        notes.append(TOO_FEW_ROUNDS)
    if contested_points([row for row in rows if on_cpu(row)]):
        notes.append(CPU_TIMES)
    return [note for note in notes if note]


def _how_they_ended(rows: Sequence[Row]) -> str:
    counts = Counter(row["status"] for row in rows)
    others = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()) if status != "ok")
    trials = "trial" if len(rows) == 1 else "trials"
    return f"{counts['ok']} of {len(rows)} {trials} gave a measurement" + (f"; {others}." if others else ".")


def _agreement_sentences(compared: Sequence[LossDifferences]) -> list[str]:
    """Whether trials with the same initial weights, data and seed show the same losses."""
    judged = [pair for pair in compared if pair.agrees is not None]
    apart = [pair for pair in judged if not pair.agrees]
    sentences = []
    if judged:
        worst = f"{max(max(pair.loss, pair.grad_norm or 0.0) for pair in judged):.1e}"
        sentences.append(
            f"{len(apart)} of {len(judged)} trials do not compute the same thing as their reference: losses or "
            f"gradient norms differ by up to {worst} (limit {LIMIT:.0e})."
            if apart
            else f"{_what_varies(judged)} compute the same thing: losses and gradient norms differ by at most {worst} "
            f"(limit {LIMIT:.0e})."
        )
    if loose := [pair for pair in compared if pair.agrees is None]:
        types = " and ".join(sorted({pair.row["dtype"] for pair in loose}))
        worst = f"{max(pair.loss for pair in loose):.1e}"
        sentences.append(f"In {types}, losses of trials with the same initial weights differ by at most {worst}.")
    return sentences


def _accuracy_sentence(rows: Sequence[Row]) -> list[str]:
    """How far attention and its gradients are from a dense float64 run, where the workers measured it."""
    measured = [row for row in rows if row["status"] == "ok" and row["task"] == "attention"]
    checked = [row for row in measured if errors_of(row)]
    if not checked:
        return []
    worst = {
        dtype: max(max(errors_of(row).values()) for row in alike)
        for dtype, alike in grouped(checked, lambda row: str(row["dtype"])).items()
    }
    listed = " and ".join(f"{error:.1e} in {dtype}" for dtype, error in sorted(worst.items()))
    some = f", in the {len(checked)} of {len(measured)} trials that were compared" if checked != measured else ""
    return [f"Attention and its gradients differ from a dense float64 run by at most {listed}{some}."]


def _what_varies(pairs: Sequence[LossDifferences]) -> str:
    """What the trials that agree differ in, as the subject of a sentence."""
    methods = any(pair.row["method"] != pair.reference["method"] for pair in pairs)
    sizes = any(
        pair.row[size] != pair.reference[size] for pair in pairs for size in ("cp_size", "tp_size", "world_size")
    )
    varied = [word for word, varies in (("methods", methods), ("parallel sizes", sizes)) if varies]
    return f"All {' and '.join(varied)}" if varied else "All trials"
