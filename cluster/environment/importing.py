"""Import of an existing env.sh: each statement is kept, changed or left out, with the reason.

The result is a fragment of a site file: networks by their exact names, everything else below `environment`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cluster.environment.ranks import process_values
from cluster.environment.rendering import template
from cluster.environment.rules import PER_METHOD, PER_TRIAL, adapter_problem, concern, interface_problem
from cluster.environment.shell_file import Assignment, read_assignments
from cluster.environment.value import is_secret, shown, variables
from cluster.inventory.software import USAGE_REPORTS

_RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
}
# Variables that find programs and libraries belong to the environment those are installed in.
_INSTALLATION = re.compile(
    r"(LD_(LIBRARY_PATH|PRELOAD)|PATH|PYTHON(PATH|HOME)|VIRTUAL_ENV|CONDA_.*|HOME|SHELL|USER|PWD)"
)
_HCA = re.compile(r"[A-Za-z0-9_]+(:\d+)?")
_DRIVER = re.compile(r"mlx\d|.*[^\d:]")  # mlx5 or bnxt_re: the beginning of many names rather than a name
_INTERFACE = re.compile(r"=?([A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14})")
_DEFAULTS = variables(process_values(device="cuda", cores=1, ranks=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The result for one line."""

    line: int
    name: str  # "" for a command
    shown: str  # the value without secrets, or the command's text
    fate: Literal["keep", "change", "drop"]
    reason: str
    key: str = ""  # where it goes in the site file: network.hcas, environment.NCCL_DEBUG; "" when dropped
    value: str | tuple[str, ...] = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Import:
    """Every statement of the file, in order."""

    origin: str
    findings: tuple[Finding, ...]

    def site_fragment(self) -> str:
        """The kept and changed values as a part of a site file; valid as a site file of its own."""
        network, environment = {}, {}
        for finding in self.findings:
            section, _, key = finding.key.partition(".")
            if section == "network":
                network[key] = finding
            elif section == "environment":
                environment[key] = finding
        # JSON is YAML too, and leaves no text to be read as a number, a truth value or a second key.
        return template("site.yaml.j2").render(
            origin=self.origin, network=network, environment=environment, scalar=lambda value: json.dumps(value)
        )


def import_env(text: str, origin: str) -> Import:
    """Judge the file's content; `origin` names it. Raises UsageError when its quotes do not close."""
    assignments = read_assignments(text, origin)
    last = {assignment.name: assignment for assignment in assignments}
    findings: list[Finding] = []
    taken: dict[str, Finding] = {}
    for assignment in assignments:
        if assignment.name and last[assignment.name] is not assignment:
            again = f"is set again on line {last[assignment.name].line}"
            finding = _finding(assignment, "drop", again)
        else:
            finding = _judge(assignment)
        earlier = taken.get(finding.key) if finding.key else None
        if earlier is not None:
            also = "has the same value" if earlier.value == finding.value else "has another value and comes first"
            finding = replace(
                finding, fate="drop", reason=f"{earlier.name} on line {earlier.line} {also}", key="", value=""
            )
        elif finding.key:
            taken[finding.key] = finding
        findings.append(finding)
    return Import(origin=origin, findings=tuple(findings))


def _finding(
    assignment: Assignment,
    fate: Literal["keep", "change", "drop"],
    reason: str,
    key: str = "",
    value: str | tuple[str, ...] = "",
) -> Finding:
    text = shown(assignment.name, assignment.value)
    return Finding(
        line=assignment.line, name=assignment.name, shown=text, fate=fate, reason=reason, key=key, value=value
    )


def _judge(assignment: Assignment) -> Finding:
    name, value = assignment.name, assignment.value
    if not name:
        return _finding(assignment, "drop", "is a command, which is not executed; a site file holds values alone")
    if is_secret(name, value):
        return _finding(assignment, "drop", "is a secret, and site files are shared; set it in your own shell")
    if assignment.is_conditional:
        return _finding(assignment, "drop", "is in a branch, loop or function, which is not run; move it out")
    if assignment.is_expanded:
        return _finding(assignment, "drop", "would be expanded by a shell; write its value out and import again")
    if name == USAGE_REPORTS:
        return _finding(assignment, "drop", "is always 0, on every node")
    if name == "NCCL_IB_HCA":
        return _adapters(assignment)
    if name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        return _interface(assignment)
    if reason := PER_METHOD.get(name) or PER_TRIAL.get(name):
        return _finding(assignment, "drop", reason)
    if _INSTALLATION.fullmatch(name):
        return _finding(assignment, "drop", "belongs to the environment programs are installed in: see software.python")
    if problem := concern(name, value):
        return _finding(assignment, "drop", problem.removeprefix(f"{name}={value} "))
    renamed = _RENAMED.get(name, name)
    if _DEFAULTS.get(renamed) == value:
        return _finding(assignment, "drop", "is rendered with this value anyway")
    if renamed != name:
        return _finding(assignment, "change", f"is called {renamed} now", f"environment.{renamed}", value)
    return _finding(assignment, "keep", "is kept as it is", f"environment.{name}", value)


def _adapters(assignment: Assignment) -> Finding:
    value = assignment.value
    problem = adapter_problem(value)
    names = tuple(name for name in value.removeprefix("=").split(",") if name)
    if value.startswith("^") or not names or not all(_HCA.fullmatch(name) for name in names):
        return _finding(assignment, "drop", problem or "names no adapters; discovery chooses them")
    if problem and any(_DRIVER.fullmatch(name) for name in names):
        return _finding(assignment, "drop", "is a prefix that many adapters match; discovery chooses among them")
    return _finding(
        assignment,
        "change" if problem else "keep",
        f"{problem}; taken as exact names" if problem else "exact names; leave it out to let discovery choose",
        "network.hcas",
        names,
    )


def _interface(assignment: Assignment) -> Finding:
    value = assignment.value
    problem = interface_problem(assignment.name, value)
    match = _INTERFACE.fullmatch(value)
    if match is None:
        return _finding(assignment, "drop", problem or "is no interface's name")
    if not match[1][-1].isdigit() and not value.startswith("="):
        return _finding(assignment, "drop", "looks like a prefix; the route to the head names the right interface")
    return _finding(
        assignment,
        "change" if problem else "keep",
        "one name for NCCL and Gloo, exact; leave it out where nodes name theirs differently",
        "network.interface",
        match[1],
    )


def summary(findings: Sequence[Finding]) -> str:
    """`3 kept, 2 changed, 4 dropped`."""
    counted = {fate: sum(finding.fate == fate for finding in findings) for fate in ("keep", "change", "drop")}
    return f"{counted['keep']} kept, {counted['change']} changed, {counted['drop']} dropped"
