"""Environments as text for people and JSON for programs. Secrets are hidden in both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cluster.environment.importing import Import, summary
from cluster.environment.rendering import NodeEnvironment
from cluster.environment.survey import Survey
from cluster.environment.value import shown
from cluster.probing.probe import printable


def table(environment: NodeEnvironment, *, every_one: bool = False) -> str:
    """The node's name, a row per variable, a row per port of its adapters, a line per warning.

    `every_one`: also a row for each variable that is left to NCCL.
    """
    values: list[tuple[str, str, str, str]] = [
        (value.name, shown(value.name, value.value), value.origin, value.reason)
        for value in (*environment.values, *environment.configured)
    ]
    if every_one:
        values += [(left.name, f"({left.default})", "left alone", left.reason) for left in environment.left_alone]
    ports = [
        (port.name, "used" if port.kept else "not used", "", port.reason) for port in environment.network.hcas.ports
    ]
    warnings = [f"  warning: {printable(warning)}" for warning in environment.warnings]
    return "\n".join([printable(environment.node), *_rows(values), *_rows(ports), *warnings])


def _rows(rows: Sequence[tuple[str, str, str, str]]) -> Iterable[str]:
    widths = [max(len(printable(row[column])) for row in rows) for column in range(3)] if rows else []
    for row in rows:
        cells = [printable(cell).ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  " + "  ".join([*filter(str.strip, cells), printable(row[-1])])


def as_json(survey: Survey) -> dict[str, Any]:
    """Everything a survey found; keys are only ever added."""
    return {
        "nodes": [_node(environment, survey) for environment in survey.environments],
        "drift": survey.drift,
        "silent": survey.silent,
    }


def _node(environment: NodeEnvironment, survey: Survey) -> dict[str, Any]:
    installed = survey.installed.get(environment.node)
    return {
        "node": environment.node,
        "variables": [
            {
                "name": value.name,
                "value": shown(value.name, value.value),
                "origin": value.origin,
                "reason": value.reason,
            }
            for value in environment.values
        ],
        "ports": [
            {"name": port.name, "used": port.kept, "reason": port.reason} for port in environment.network.hcas.ports
        ],
        "nccl_conf": [
            {"name": value.name, "value": shown(value.name, value.value), "place": value.reason}
            for value in environment.configured
        ],
        "left_alone": [
            {"name": left.name, "default": left.default, "reason": left.reason} for left in environment.left_alone
        ],
        "warnings": list(environment.warnings),
        "installed": installed and {"path": installed.path, "what": installed.what, "kept": installed.kept or None},
    }


def import_table(found: Import) -> str:
    """A line per statement of the file: its fate and why, then how many of each."""
    lines = []
    for finding in found.findings:
        text = f"{finding.name}={finding.shown}" if finding.name else finding.shown
        target = f" -> {finding.key}" if finding.key else ""
        lines.append(f"{found.origin}:{finding.line}: {finding.fate.ljust(6)}  {text}{target}: {finding.reason}")
    return "\n".join(printable(line) for line in [*lines, f"{found.origin}: {summary(found.findings)}"])


def import_json(found: Import) -> dict[str, Any]:
    """The same as data, with the fragment as text."""
    return {
        "file": found.origin,
        "findings": [
            {
                "line": finding.line,
                "name": finding.name or None,
                "value": finding.shown,
                "fate": finding.fate,
                "key": finding.key or None,
                "reason": finding.reason,
            }
            for finding in found.findings
        ],
        "site": found.site_fragment(),
    }
