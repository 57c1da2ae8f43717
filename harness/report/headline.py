"""The sentences above a report's tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.base.lengths import format_length
from harness.report.agreement import LIMIT, agreements
from harness.report.results import Row, method_rank
from harness.report.summary import CPU_TIMES, on_cpu, series_names
from harness.report.tables import significant
from harness.report.variants import panel_name, panel_of, setups_of


def summary_sentences(rows: Sequence[Row]) -> list[str]:
    """How many trials ended with each status, which method was fastest, and whether the losses agree.

    No method is called fastest on a CPU: a sentence says why.
    """
    if not rows:
        return ["No trial was recorded."]
    counts = Counter(row["status"] for row in rows)
    others = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()) if status != "ok")
    sentences = [
        f"{counts['ok']} of {len(rows)} {'trial' if len(rows) == 1 else 'trials'} gave a measurement"
        + (f"; {others}." if others else ".")
    ]
    contests = [contest for group in setups_of(rows) if (contest := _contest(group))]
    sentences += [_fastest(contest, rows) for contest in contests if not on_cpu(contest[0])]
    if any(on_cpu(contest[0]) for contest in contests):
        sentences.append(CPU_TIMES)
    return sentences + _agreement_sentences(rows)


def _contest(group: Sequence[Row]) -> list[Row]:
    """Rows of the largest point of a set-up at which at least two methods were measured; none where there is none."""
    points: dict[tuple[int, tuple[int, int, int]], list[Row]] = {}
    for row in group:
        if row["status"] == "ok":
            points.setdefault((row["seq_len"], panel_of(row)), []).append(row)
    contested = [point for point, members in points.items() if len({row["method"] for row in members}) > 1]
    return points[max(contested)] if contested else []


def _fastest(contest: Sequence[Row], rows: Sequence[Row]) -> str:
    """The fastest trial of a contest, and by how much. Series are named among all `rows`."""
    names = {id(row): name for row, name in zip(rows, series_names(rows), strict=True)}
    ranked = sorted(contest, key=lambda row: (row["step_seconds_median"], method_rank(row["method"])))
    best = ranked[0]
    second = next(row for row in ranked if row["method"] != best["method"])
    ratio = second["step_seconds_median"] / best["step_seconds_median"]
    apart = second["step_seconds_median"] - best["step_seconds_median"]
    spread = ((best["step_seconds_iqr"] or 0.0) + (second["step_seconds_iqr"] or 0.0)) / 2
    work = "training" if best["task"] == "train" else "attention"
    return (
        f"Fastest {work} at {format_length(best['seq_len'])} tokens on {panel_name(panel_of(best))} "
        f"({best['model']}, {best['dtype']}): {names[id(best)]} with "
        f"{significant(4)(best['tokens_per_gpu_per_second'])} tokens/s per GPU, "
        f"{ratio:.2f}× the speed of {names[id(second)]}"
        + (", a difference within the spread of the steps." if apart <= spread else ".")
    )


def _agreement_sentences(rows: Sequence[Row]) -> list[str]:
    compared = [pair for pair in agreements(rows) if pair.row is not pair.reference]
    bound = [pair for pair in compared if pair.agrees is not None]
    loose = [pair for pair in compared if pair.agrees is None]
    sentences = []
    if bound:
        apart = [pair for pair in bound if not pair.agrees]
        worst = max(max(pair.loss, pair.grad_norm or 0.0) for pair in bound)
        verdict = (
            f"{len(apart)} of {len(bound)} trials differ from their reference by more than {LIMIT:.0e}"
            if apart
            else f"Losses and gradient norms agree within {LIMIT:.0e} between all methods and parallel sizes"
        )
        sentences.append(f"{verdict} (largest relative difference {worst:.1e}).")
    if loose:
        worst = max(pair.loss for pair in loose)
        types = " and ".join(sorted({pair.row["dtype"] for pair in loose}))
        sentences.append(f"In {types} the losses differ by at most {worst:.1e} relative.")
    return sentences
