"""Verdicts of other tools, read where they are installed: NVIDIA's DCGM, and Meta's gcm.

A tool that is absent, or gives no verdict, is no finding about the node: the checks here judge by themselves. What
NVIDIA's driver asks for by itself is the check `gpu_recovery`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cluster.checks import check
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict, fail, merge, ok, unknown, warn, with_facts
from cluster.profiles import Board

# `health` reads what the host engine has watched; level 1 of `diag` looks at software and settings within seconds.
_DCGM = Probe(
    script="""
command -v dcgmi >/dev/null 2>&1 || { echo absent; echo end; exit 0; }
one() { words=$("$@" 2>&1); printf '%s %s\\n' "$2" "$(printf '%s' "$words" | tr '\\n' ' ')"; }
one dcgmi health -g 0 -c -j
one dcgmi diag -r 1 -j
echo end
""",
    seconds=45.0,
)


@check(_DCGM, "NVIDIA DCGM: dcgmi health -c and diag -r 1; facebookresearch/gcm", unreadable="DCGM was not asked")
def dcgm(output: Output, site: Site, board: Board) -> Verdict:
    """Fails and warns as DCGM does, in its words."""
    if "absent" in output.lines:
        return ok("DCGM is not installed")
    readers = {"health": _health, "diag": _diagnostic}
    found = [one for tag, read in readers.items() for row in output.rows(tag) for one in _read(tag, row, read)]
    if not found:
        return unknown("DCGM printed neither health nor a diagnostic")
    return merge(found)


def _read(tag: str, row: str, read: Callable[[Mapping[str, Any]], Iterator[Verdict]]) -> Iterator[Verdict]:
    try:
        yield from read(json.loads(row))
    except (ValueError, KeyError, TypeError, AttributeError):
        words = printable(" ".join(row.split())[:160]) or "silent"
        advice = "; dcgmi health -g 0 -s a turns its watches on" if "watches not enabled" in row else ""
        yield ok(f"dcgmi {tag} gives no verdict ({words}){advice}", facts={tag: None})


def _health(report: Mapping[str, Any]) -> Iterator[Verdict]:
    """Of `{"body": {"Overall Health": {"value": ...}, "GPU": {"children": {"0": {"children": {"Errors": ...}}}}}}`."""
    overall = str(report["body"]["Overall Health"]["value"])
    incidents = [
        f"{kind} {number}, {system}: {' '.join(map(str, error.get('overflow', ())))}"
        for kind, entities in report["body"].items()
        for number, entity in entities.get("children", {}).items()
        for system, error in entity["children"]["Errors"]["children"].items()
    ]
    yield with_facts(_graded(overall, "DCGM's health", incidents), health=overall)


def _diagnostic(report: Mapping[str, Any]) -> Iterator[Verdict]:
    """Of DCGM 3 and 4, which name the report and a test's summary differently."""
    whole = report["DCGM Diagnostic"] if "DCGM Diagnostic" in report else report["DCGM GPU Diagnostic"]
    graded: dict[str, list[str]] = {}
    for test in (test for category in whole["test_categories"] for test in category["tests"]):
        for result in test["results"]:
            warnings = result.get("warnings") or []
            texts = [warnings] if isinstance(warnings, str) else [one.get("warning", one) for one in warnings]
            words = ": ".join(printable(str(text)) for text in [test["name"], *texts])
            graded.setdefault(str(result["status"]).casefold(), []).append(words)
    worst = next((status for status in ("fail", "warn") if status in graded), "pass")
    findings = list(dict.fromkeys(graded[worst])) if worst != "pass" else []
    yield with_facts(_graded(worst, "DCGM's diagnostic", findings), diag=worst)


_SHOWN = 4


def _graded(word: str, what: str, findings: list[str]) -> Verdict:
    listed = "; ".join(findings[:_SHOWN]) + (" ..." if len(findings) > _SHOWN else "")
    summary = f"{what}: {printable(word)}" + (f" ({printable(listed)})" if listed else "")
    grade = word.casefold()
    if grade in ("failure", "fail"):
        return fail(summary)
    return ok(summary) if grade in ("healthy", "pass") else warn(summary)


# Each prints a sentence and ends like a Nagios plugin; none of them changes the node. Its log goes to a folder of ours.
GCM_CHECKS = (
    "check-nvidia-smi -c row_remap -c ecc_uncorrected_volatile_total",
    "check-syslogs xid",
    "check-syslogs io-errors",
    "check-syslogs link-flaps",
)
_GRADES = {"0": ok, "1": warn, "2": fail}
_GCM = Probe(
    script=f"""
command -v health_checks >/dev/null 2>&1 || {{ echo absent; echo end; exit 0; }}
logs=$(mktemp -d) || exit 1
trap 'rm -rf -- "$logs"' EXIT
one() {{
    words=$(health_checks "$@" --sink=do_nothing --log-folder "$logs" burst app 2>&1)
    printf 'gcm %s|%s|%s\\n' "$?" "$*" "$(printf '%s' "$words" | tr '\\n' ' ')"
}}
{chr(10).join(f"one {check}" for check in GCM_CHECKS)}
echo end
""",
    seconds=45.0,
)


@check(_GCM, "facebookresearch/gcm, health_checks, which ends like a Nagios plugin", unreadable="gcm was not asked")
def gcm(output: Output, site: Site, board: Board) -> Verdict:
    """Fails and warns as gcm's health checks do, in their words."""
    if "absent" in output.lines:
        return ok("gcm is not installed")
    rows = [[printable(cell) for cell in row.split("|", 2)] for row in output.rows("gcm")]
    if len(rows) < len(GCM_CHECKS) or any(len(row) != 3 for row in rows):
        return unknown(f"gcm was asked {len(GCM_CHECKS)} times and answered {len(rows)}")
    found = []
    for status, name, words in rows:
        summary = f"gcm, {name}: {' '.join(words.split())[:160] or 'silent'}"
        # click, which reads gcm's options, ends with 2 as well where it does not know one.
        judged = status in _GRADES and "Usage:" not in words
        found.append(_GRADES[status](summary) if judged else ok(f"{summary} (no verdict, exit status {status})"))
    return merge(found)
