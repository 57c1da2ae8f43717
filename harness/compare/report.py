"""A comparison in words, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any, get_args

from harness.base.lengths import format_length
from harness.compare.pairs import ComparedRecord, Comparison, TrialPair, is_across
from harness.metrics.intervals import Interval, TwoRounds, Verdict
from harness.records.stored import stored_run
from harness.report.digits import spread_text
from harness.report.speedup import TWO_VALUES, numbers_text, rounds_text
from harness.report.tables.table import Column, Table, number, significant, table_of, text
from harness.report.variants import panel_name, panel_of, setting_text

SCHEMA = 1
_PLACED = frozenset({"task", "model", "seq_len", "cp_size", "tp_size", "world_size", "method"})  # in every trial's name
_MOST_LISTED = 20  # trials without a partner, on a terminal
_MOST_LISTED_FACTS = 4  # variables of the environment, and packages of one side, that differ
_LONGEST_VALUE = 48  # characters of a differing fact


def trial_names(comparison: Comparison) -> dict[int, str]:
    """Names of all trials by the identity of their member: `train 1b 256k CP 4 burst, kernel fa4`.

    Settings appear where they vary, but for those in which the two of a pair differ: the two have one name.
    """
    pairs = [member for pair in comparison.pairs for member in (pair.reference, pair.candidate)]
    members = [*pairs, *comparison.only_reference, *comparison.only_candidate]
    settings = [member.settings for member in members]
    varying = [
        name
        for name in sorted({name for one in settings for name in one})
        if name not in _PLACED
        and not name.startswith("model.")
        and not is_across(name, comparison.across)
        and len({one.get(name) for one in settings}) > 1
    ]
    experiments = len({member.record.experiment for member in members}) > 1
    runs = comparison.one_run and len({member.run for member in members}) > 1
    names = {}
    for member, own in zip(members, settings, strict=True):
        row = member.row
        parts = [row["task"], row["model"], format_length(row["seq_len"]), panel_name(panel_of(row))]
        if "method" not in comparison.across:
            parts.append(row["method"])
        texts = [" ".join(parts), *(setting_text(name, own.get(name)) for name in varying)]
        texts += [stored_run(member.run).name] if runs else [member.record.experiment] if experiments else []
        names[id(member)] = ", ".join(texts)
    return names


def heading(comparison: Comparison) -> list[str]:
    """What A and B are, how their rounds were drawn, and what else differs between them."""
    first, second = comparison.labels
    measured = [pair for pair in comparison.pairs if pair.times is not None]
    lines = [f"A (reference): {first}", f"B (candidate): {second}"]
    if comparison.repeated:
        records = "1 earlier record is" if comparison.repeated == 1 else f"{comparison.repeated} earlier records are"
        lines.append(f"{records} passed over: of equal settings on one side the latest counts.")
    differences = comparison.differences()
    if any(fact == "GPU" for fact, *_ in differences):
        lines.append("A and B ran on different GPUs: ratios of such pairs compare machines as well.")
    variables = [fact for fact, *_ in differences if fact.startswith("environment ")]
    packages = [fact for fact, before, now, _ in differences if fact.startswith("software ") and not (before and now)]
    left = {*variables[_MOST_LISTED_FACTS:], *packages[_MOST_LISTED_FACTS:]}
    for fact, before, now, count in differences:
        if fact not in left:
            texts = [_short(value) or "not recorded" for value in (before, now)]
            lines.append(f"Differs: {fact}: A {texts[0]}, B {texts[1]} ({_of(count, len(measured))})")
    for found, what in ((packages, "packages that one of the two has"), (variables, "environment variables")):
        if len(found) > _MOST_LISTED_FACTS:
            lines.append(f"Differs: {len(found) - _MOST_LISTED_FACTS} more {what} (--json lists all)")
    paired, later = (sum(map(attrgetter(name), measured)) for name in ("paired", "later"))
    if paired:
        which = "a pair" if paired == len(measured) else _of(paired, len(measured))
        lines.append(f"Both sides of {which} ran in the same rounds, which are drawn together.")
    if later:
        lines.append(f"In {_pairs(later)} one side ran later than the other: rounds are drawn one by one.")
    for rounds, count in Counter(pair.apart for pair in measured if pair.apart).items():
        lines.append(f"Left out: {numbers_text(rounds)} of {_pairs(count)}, which ran on two machines.")
    return lines


def closing(comparison: Comparison, names: dict[int, str]) -> list[str]:
    """Counts of verdicts, geometric mean, and every regression."""
    tolerance = comparison.tolerance
    verdicts = Counter(pair.verdict for pair in comparison.pairs)
    counted = [f"{verdicts[word]} {word}" for word in (*get_args(Verdict), "not judged") if verdicts[word]]
    others = [pair.outcome for pair in comparison.pairs if pair.outcome != "compared"]
    words = {"lost": "measured in A alone", "gained": "measured in B alone", "neither": "without a number in both"}
    counted += [f"{others.count(outcome)} {text}" for outcome, text in words.items() if outcome in others]
    total = len(comparison.pairs)
    sentence = f"B against A in {_pairs(total)}: {', '.join(counted)}"
    memory = [word for pair in comparison.pairs if (word := pair.memory_word(tolerance))]
    held = [f"{word} in {memory.count(word)}" for word in ("less", "equal", "more") if word in memory]
    if held:
        sentence += f"; memory {', '.join(held)}"
    if comparison.mean_ratio is not None:
        sentence += f"; geometric mean of the times B ÷ A {comparison.mean_ratio:.3f}"
    regressed = comparison.regressions
    wrong = [f"Wrong in {side}: {names[id(one)]}: {one.record.reason}" for side, one in comparison.wrong]
    listed = [
        f"Regression: {names[id(pair.reference)]}: {pair.regression(tolerance)}" for pair in regressed[:_MOST_LISTED]
    ]
    return [*wrong, *listed, f"{sentence}. {_judgement(comparison)}"]


def _judgement(comparison: Comparison) -> str:
    """How many regressions there are, and of how many pairs the time is not judged."""
    regressed, few, beyond = len(comparison.regressions), comparison.not_judged, _percent(comparison.tolerance)
    said = f"{regressed or 'No'} regression{'s' if regressed > 1 else ''} beyond {beyond}"
    if not few:
        return f"{said}."
    measured = sum(pair.times is not None for pair in comparison.pairs)
    pairs = "the pair" if measured == 1 else _of(few, measured)
    left = f"The time of {pairs} is not judged, with too few rounds; steps.rounds: 3 gives an interval."
    # Where no time is judged, "no regression" would say more than was found.
    return f"{said}. {left}" if regressed or few < measured else left


def alone(comparison: Comparison, names: dict[int, str]) -> list[str]:
    """The trials that only one side has."""
    lines = []
    for side, members in (("A", comparison.only_reference), ("B", comparison.only_candidate)):
        if members:
            lines.append(f"Only in {side}: {len(members)} {'trial' if len(members) == 1 else 'trials'}")
            lines += [f"  {names[id(member)]} ({member.record.status})" for member in members[:_MOST_LISTED]]
            if len(members) > _MOST_LISTED:
                lines.append(f"  and {len(members) - _MOST_LISTED} more (--json lists all)")
    return lines


# Of every table of `comparison_of` that was saved, in each form.
TABLE_BEGINNINGS = {
    "md": "### B: ",
    "tex": "\\begin{table}\n  \\centering\\small\n  \\caption{B: ",
    "csv": "trial,A ms,",
}


def comparison_of(comparison: Comparison, names: dict[int, str]) -> Table:
    """All pairs as a table for papers and pages."""
    tolerance, percent = comparison.tolerance, _percent(comparison.tolerance)
    ms, ratio = significant(4, 1e3), "{:.3f}".format

    def times(side: str, of: Callable[[TrialPair], ComparedRecord]) -> list[Column]:
        return [
            number(f"{side} ms", lambda pair: of(pair).row["step_seconds_median"] or of(pair).record.status, ms),
            number(f"{side} n", lambda pair: of(pair).row["samples"]),
            number(f"{side} rounds", lambda pair: of(pair).row["rounds"]),
        ]

    def peak(side: str, of: Callable[[TrialPair], ComparedRecord]) -> Column:
        return number(
            f"{side} GiB", lambda pair: of(pair).row[pair.memory_column] if pair.memory_column else None, significant(3)
        )

    reference, candidate = attrgetter("reference"), attrgetter("candidate")
    columns = (
        text("trial", lambda pair: names[id(pair.reference)]),
        *times("A", reference),
        *times("B", candidate),
        number("B ÷ A", lambda pair: pair.times and pair.times.value, ratio),
        number("interval", lambda pair: pair.spread, _interval),
        text("verdict", lambda pair: pair.found and pair.found.text_of(pair.verdict)),
        peak("A", reference),
        peak("B", candidate),
        number("memory B ÷ A", lambda pair: pair.memory, ratio),
        text("memory", lambda pair: pair.memory_word(tolerance)),
        number("loss difference", lambda pair: pair.loss, "{:.1e}".format),
        text("regression", lambda pair: pair.regression(tolerance) or None),
    )
    note = (
        "ms = median over n measured steps; B ÷ A = ratio of these medians; interval = its 95% interval, whole rounds "
        "resampled, absent where a side has fewer than three rounds; faster and slower mean that it excludes 1; not "
        f"judged: too few rounds; {TWO_VALUES}. GiB = peak per GPU (on a CPU of the process), maximum over ranks; "
        f"equal within {percent}. Loss difference = |a − b| ÷ max(|a|, |b|), the largest over all steps. A regression "
        f"is beyond {percent}: slower with the whole interval or in both of two rounds, more memory, or no number any "
        "more. " + " ".join(heading(comparison)[2:])
    )
    title = f"B: {comparison.labels[1]}, against A: {comparison.labels[0]}"
    table = table_of(
        "compare", title, columns, comparison.pairs, note=note, marked=lambda pair: bool(pair.regression(tolerance))
    )
    assert table is not None, "a comparison without pairs is refused"
    return table


def pair_lines(comparison: Comparison, names: dict[int, str]) -> list[str]:
    """All pairs for a terminal of 80 columns: the trial's name on one line, its figures aligned below it."""
    header = ("A ms (n/r)", "B ms (n/r)", "B ÷ A", "interval", "verdict", "memory", "loss")
    cells = [header, *(_cells(pair, comparison.tolerance) for pair in comparison.pairs)]
    columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    aligned = [
        [cell.ljust(width) if column[0] == "verdict" else cell.rjust(width) for cell in column]
        for column, width in zip(columns, widths, strict=True)
    ]
    texts = [f"  {' '.join(line).rstrip()}" for line in zip(*aligned, strict=True)]
    lines = [texts[0]]
    for pair, figures in zip(comparison.pairs, texts[1:], strict=True):
        lines += [("! " if pair.regression(comparison.tolerance) else "") + names[id(pair.reference)], figures]
    note = "ms: median of n measured steps in r rounds. memory: peak of B against A."
    return [*lines, note + (" !: regression." if comparison.regressions else "")]


def to_plain(comparison: Comparison, names: dict[int, str]) -> dict[str, object]:
    """The comparison as JSON values; ratios are B over A, intervals [low, high], absent figures null."""
    return {
        "schema": SCHEMA,
        "reference": comparison.labels[0],
        "candidate": comparison.labels[1],
        "tolerance": comparison.tolerance,
        "differences": [
            {"fact": fact, "reference": before, "candidate": now, "pairs": count}
            for fact, before, now, count in comparison.differences()
        ],
        "pairs": [_pair_to_plain(pair, comparison.tolerance, names) for pair in comparison.pairs],
        "only_reference": [_member_to_plain(member) for member in comparison.only_reference],
        "only_candidate": [_member_to_plain(member) for member in comparison.only_candidate],
        "earlier_records_passed_over": comparison.repeated,
        "verdicts": dict(comparison.verdicts),
        "mean_ratio": comparison.mean_ratio,
        "regressions": len(comparison.regressions),
        "not_judged": comparison.not_judged,
        "wrong": [{"side": side, **_member_to_plain(one)} for side, one in comparison.wrong],
    }


def _pair_to_plain(pair: TrialPair, tolerance: float, names: dict[int, str]) -> dict[str, Any]:
    times = pair.times
    return {
        "name": names[id(pair.reference)],
        "outcome": pair.outcome,
        "reference": _member_to_plain(pair.reference),
        "candidate": _member_to_plain(pair.candidate),
        "time": times
        and {
            "ratio": times.value,
            "interval": [times.interval.low, times.interval.high] if times.interval else None,
            "by_round": list(times.by_round) if times.by_round else None,
            "verdict": times.verdict(),
            "judged": not pair.too_few_rounds(tolerance),
            "paired": pair.paired,
            "one_side_ran_later": pair.later,
            "rounds_on_two_machines": list(pair.apart),
        },
        "memory": {
            "of": pair.memory_column,
            "ratio": pair.memory,
            "verdict": pair.memory_word(tolerance),
        }
        if pair.memory is not None
        else None,
        "loss_difference": pair.loss,
        "regression": pair.regression(tolerance) or None,
    }


def _member_to_plain(member: ComparedRecord) -> dict[str, Any]:
    row = member.row
    columns = ("trial_id", "status", "reason", "samples", "rounds", "step_seconds_median", "peak_memory_gib",
               "peak_rss_gib", "gpu", "driver", "commit")  # fmt: skip
    return {"record": str(member.place), **{name: row[name] for name in columns}}


def _cells(pair: TrialPair, tolerance: float) -> tuple[str, ...]:
    """What a terminal shows of a pair; an empty text where there is nothing."""
    times, memory, spread = pair.times, pair.memory, pair.spread
    return (
        _time_cell(pair.reference),
        _time_cell(pair.candidate),
        f"{times.value:.3f}" if times else "",
        _interval(spread).replace(" to ", "–") if spread else rounds_text(1) if times else "",
        pair.verdict if times else "" if pair.outcome == "neither" else pair.outcome,
        "" if memory is None else "equal" if pair.memory_word(tolerance) == "equal" else f"{100 * (memory - 1):+.1f}%",
        "" if pair.loss is None else f"{pair.loss:.0e}" if pair.loss else "0",
    )


def _interval(spread: Interval | TwoRounds) -> str:
    """With as many digits as the ratio beside it, which `--tolerance` is held against."""
    return spread_text(spread, "{:.3f}".format)


def _time_cell(member: ComparedRecord) -> str:
    row = member.row
    if row["step_seconds_median"] is None:
        return str(row["status"])
    return f"{significant(4, 1e3)(row['step_seconds_median'])} ({row['samples']}/{row['rounds']})"


def _pairs(count: int) -> str:
    return "1 pair" if count == 1 else f"{count} pairs"


def _of(count: int, total: int) -> str:
    return "all pairs" if count == total else f"{count} of {total} pairs"


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}..."


def _percent(tolerance: float) -> str:
    return f"{100 * tolerance:g}%"
