"""What a run of cases found: a table, JSON of a stable form, one HTML file with a badge, and bug reports."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, fields
from html import escape

from conform.cases import WAYS, ConformCase
from conform.run import HANG, NOT_CLAIMED, PASSED, CaseResult
from conform.target import version_of

SCHEMA = "burst-conform/1"  # raised when a field is renamed or goes; fields may be added
_MARK = {PASSED: "ok", NOT_CLAIMED: "-"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformReport:
    """All results of one target. `command` is what was typed."""

    target: str
    version: str
    command: str
    device: str
    results: Sequence[CaseResult]

    @property
    def cases(self) -> list[ConformCase]:
        return list(dict.fromkeys(result.case for result in self.results))

    @property
    def ranks(self) -> list[int]:
        return sorted({result.ranks for result in self.results})

    def of(self, case: ConformCase) -> list[CaseResult]:
        return [result for result in self.results if result.case == case]

    def status(self, case: ConformCase) -> str:
        """That of the first number of ranks on which it failed; passed where it passed on all that claim it."""
        results = self.of(case)
        for result in results:
            if result.failed:
                return result.status
        return PASSED if any(result.status == PASSED for result in results) else NOT_CLAIMED

    @property
    def claimed(self) -> int:
        return sum(self.status(case) != NOT_CLAIMED for case in self.cases)

    @property
    def passed(self) -> int:
        return sum(self.status(case) == PASSED for case in self.cases)

    @property
    def failures(self) -> list[CaseResult]:
        return [result for result in self.results if result.failed]

    @property
    def badge_text(self) -> str:
        return f"{self.passed}/{self.claimed}"


def versions() -> dict[str, str]:
    """Of what computed: Python, torch and this package."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in ("torch", "burst-harness")}


def summary(report: ConformReport) -> str:
    """One sentence."""
    asked = f"on {', '.join(map(str, report.ranks))} ranks ({report.device})"
    silent = len(report.cases) - report.claimed
    unclaimed = f"; {silent} not claimed" if silent else ""
    if not report.claimed:
        return f"{report.target} {report.version}: claims none of {len(report.cases)} cases {asked}"
    verb = "passes" if report.passed == report.claimed else "fails"
    count = f"all {report.claimed}" if verb == "passes" else f"{report.claimed - report.passed} of {report.claimed}"
    cases = f"{count} cases that it claims" if report.claimed > 1 else "the one case that it claims"
    return f"{report.target} {report.version}: {verb} {cases} {asked}{unclaimed}"


def table(report: ConformReport) -> list[str]:
    """Lines: a case, its result on each number of ranks, and what is wrong below it."""
    width = max((len(case.name) for case in report.cases), default=4)
    columns = "".join(f"{f'{count} ranks' if count > 1 else '1 rank':>13}" for count in report.ranks)
    lines = [f"{'case':<{width}}{columns}"]
    for case in report.cases:
        by_ranks = {result.ranks: result for result in report.of(case)}
        cells = [
            _MARK.get(by_ranks[count].status, by_ranks[count].status) if count in by_ranks else ""
            for count in report.ranks
        ]
        lines.append(f"{case.name:<{width}}" + "".join(f"{cell:>13}" for cell in cells))
        for result in by_ranks.values():
            if result.failed:
                more = len(result.sentences) - 1
                rest = f" (and {more} more)" if more else ""
                lines.append(f"    {result.ranks} ranks: {result.sentences[0]}{rest}")
    return [*lines, summary(report)]


def as_json(report: ConformReport) -> dict[str, object]:
    """One value with `schema`; the results of every case in order."""
    return {
        "schema": SCHEMA,
        "target": report.target,
        "version": report.version,
        "command": report.command,
        "device": report.device,
        "versions": versions(),
        "passed": report.passed,
        "claimed": report.claimed,
        "cases": [
            {
                "name": case.name,
                "source": case.source,
                "status": report.status(case),
                "results": [
                    {
                        "ranks": result.ranks,
                        "status": result.status,
                        "seconds": round(result.seconds, 3),
                        "sentences": list(result.sentences),
                        "differences": [_finite(each) for each in result.differences],
                    }
                    for result in report.of(case)
                ],
            }
            for case in report.cases
        ],
    }


def _finite(data: dict[str, object]) -> dict[str, object]:
    """JSON has no infinity: it is written as text."""
    infinite = (float("inf"), float("-inf"))
    return {
        name: str(value) if isinstance(value, float) and value in infinite else value for name, value in data.items()
    }


def bug_report(report: ConformReport, result: CaseResult) -> str:
    """Markdown that a failing case gives its user for the system's tracker."""
    case = result.case
    found = "\n".join(f"- {sentence}" for sentence in result.sentences[:5])
    installed = ", ".join(f"{name} {text}" for name, text in versions().items())
    asked = ", ".join(f"{name}={value!r}" for name, value in _asked(case).items())
    wanted = "an answer of every rank" if result.status == HANG else (
        "what one process computes in float64, to the error of the dtype"
    )  # fmt: skip
    trace = f"\n```\n{result.trace.strip()}\n```\n" if result.trace else ""
    return (
        f"## {report.target}: case {case.name} on {result.ranks} ranks\n\n"
        f"Versions: {report.target} {report.version}, {installed}, {report.device}\n\n"
        f"Command: `{report.command}`\n\n"
        f"Problem: {asked or 'the default one'}. {case.way}: {WAYS[case.way]}.\n\n"
        f"Expected: {wanted}.\n\nFound:\n\n{found}\n{trace}\nThe case is from: {case.source}\n"
    )


def _asked(case: ConformCase) -> dict[str, object]:
    """Fields of the problem that are not the default."""
    found = {}
    for field in fields(case.problem):
        value = getattr(case.problem, field.name)
        if field.default != value and field.name not in ("group", "state", "sinks_N"):
            found[field.name] = value
    return found


def badge(report: ConformReport) -> str:
    """An SVG image: `burst conform: 41/41`, green where all claimed cases pass."""
    colour = "#2e7d32" if report.claimed and report.passed == report.claimed else "#c62828"
    left, right = 104, 12 + 7 * len(report.badge_text)
    text = escape(report.badge_text)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="burst conform: {text}"><title>burst conform: {text}</title>'
        f'<rect width="{left}" height="20" fill="#444"/><rect x="{left}" width="{right}" height="20" fill="{colour}"/>'
        '<g fill="#fff" font-family="Verdana,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2}" y="14">burst conform</text><text x="{left + right / 2}" y="14">{text}</text></g></svg>'
    )


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:left;"
    "vertical-align:top}.passed{color:#2e7d32}.wrong,.error,.hang{color:#c62828;font-weight:600}"
    "pre{background:#f4f4f4;padding:.7rem;overflow:auto}"
)


def as_html(report: ConformReport) -> str:
    """One file without anything from outside."""
    heads = "".join(f"<th>{count} rank{'s' if count > 1 else ''}</th>" for count in report.ranks)
    rows = []
    for case in report.cases:
        by_ranks = {result.ranks: result for result in report.of(case)}
        cells = "".join(_cell(by_ranks.get(count)) for count in report.ranks)
        rows.append(f"<tr><td>{escape(case.name)}</td><td>{_source(case.source)}</td>{cells}</tr>")
    bugs = "".join(
        f"<details><summary>{escape(result.case.name)} on {result.ranks} ranks</summary>"
        f"<pre>{escape(bug_report(report, result))}</pre></details>"
        for result in report.failures
    )
    title = f"burst conform: {escape(report.target)} {escape(report.version)}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>"
        f"<body><h1>{title}</h1><p>{badge(report)}</p><p>{escape(summary(report))}</p>"
        f"<p>Command: <code>{escape(report.command)}</code></p>"
        f"<table><thead><tr><th>case</th><th>source</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        + (f"<h2>Bug reports</h2>{bugs}" if bugs else "")
        + "</body></html>\n"
    )


def _cell(result: CaseResult | None) -> str:
    if result is None:
        return "<td></td>"
    said = "<br>".join(escape(sentence) for sentence in result.sentences[:3]) if result.failed else ""
    kind = escape(result.status.replace(" ", "-"))
    return f'<td><span class="{kind}">{escape(result.status)}</span>{f"<br>{said}" if said else ""}</td>'


def _source(source: str) -> str:
    repository, mark, number = source.partition("#")
    if mark and number.isdigit():
        return f'<a href="https://github.com/{escape(repository)}/issues/{number}">{escape(source)}</a>'
    return escape(source)


def dumped(report: ConformReport) -> str:
    return json.dumps(as_json(report), indent=1, allow_nan=False) + "\n"
