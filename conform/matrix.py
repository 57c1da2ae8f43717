"""What `burst conform` found of each system, as one table: the results that are committed in results/conform.

Each file there is the `report.json` of a run on CPU ranks, and in its folder `cuda` of one on GPUs. `not_run.yaml` has
the systems that do not run, each with the reason in one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from conform.cases import CASES, cases_of
from conform.report import SCHEMA
from conform.run import NOT_CLAIMED, PASSED

NOT_RUN = "not_run.yaml"
ON_GPUS = ", on GPUs"  # behind a system's name


def matrix_lines(folder: Path) -> list[str]:
    """Markdown: a line for each system that ran, with what failed, then one for each that did not.

    Raises ValueError for a file of another schema, or one that has another case than there are now.
    """
    lines = ["| system | version | passes | not claimed | fails |", "| --- | --- | --- | --- | --- |"]
    reports = [_read(path) for path in sorted(folder.rglob("*.json"))]
    for report in sorted(reports, key=lambda each: (each["failed"] > 0, each["target"].lower())):
        cells = (
            report["target"] + (ON_GPUS if report["device"] == "cuda" else ""),
            f"`{report['version']}`",
            f"{report['passed']} of {report['claimed']}",
            report["silent"],
        )
        lines.append(f"| {' | '.join(map(str, cells))} | {report['failures'] or '-'} |")
    lines += ["", "| system | why it does not run here |", "| --- | --- |"]
    absent: Mapping[str, str] = yaml.safe_load((folder / NOT_RUN).read_text(encoding="utf-8"))
    return [*lines, *(f"| {system} | {reason} |" for system, reason in absent.items())]


def _read(path: Path) -> dict[str, Any]:
    """A report, with its failures as text and how many cases of its kind the target does not claim."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if report["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {report['schema']}, expected {SCHEMA}; run the target again")
    names = {case["name"] for case in report["cases"]}
    current = [{case.name for case in cases_of(kind)} for kind in sorted({case.kind for case in CASES})]
    if names not in current:
        kind = max(current, key=lambda kinds: len(kinds & names))
        other = sorted(names ^ kind)
        raise ValueError(f"{path} has other cases than there are now ({', '.join(other[:3])}); run it again")
    failed = {case["name"]: _ranks(case) for case in report["cases"] if case["status"] not in (PASSED, NOT_CLAIMED)}
    silent = sum(case["status"] == NOT_CLAIMED for case in report["cases"])
    text = ", ".join(f"{name} ({ranks})" for name, ranks in failed.items())
    return report | {"failed": len(failed), "failures": text, "silent": silent}


def _ranks(case: Mapping[str, Any]) -> str:
    """On how many ranks a case failed, and how."""
    found = [(each["ranks"], each["status"]) for each in case["results"] if each["status"] not in (PASSED, NOT_CLAIMED)]
    return ", ".join(f"{status} on {ranks}" for ranks, status in found)
