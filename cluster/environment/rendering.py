"""From a node's facts and its site to the node's environment; its form as env.sh, as a table and as data.

Secrets are hidden in all forms but env.sh.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.discovery.drift import NodeNetwork
from cluster.discovery.facts import NodeFacts
from cluster.discovery.hcas import choose_hcas, choose_interface
from cluster.environment.ranks import (
    DEFAULT_METHOD,
    LEFT_ALONE,
    LeftAlone,
    adapter_values,
    concern,
    configured,
    process_values,
    socket_values,
)
from cluster.environment.value import Variable, overlaid, shown, variables
from cluster.inventory.site import Site
from cluster.inventory.software import USAGE_REPORTS
from cluster.probing.probe import printable

_PLAIN = re.compile(r"[A-Za-z0-9_.,:%/-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEnvironment:
    """Everything `burst cluster env` shows about one node."""

    values: tuple[Variable, ...]
    network: NodeNetwork
    warnings: tuple[str, ...]
    configured: tuple[Variable, ...] = ()  # what NCCL takes from its own files, which env.sh need not repeat

    @property
    def left_alone(self) -> list[LeftAlone]:
        """Variables of NCCL that nothing here sets; none on a node that does not use NCCL."""
        taken = {value.name for value in (*self.values, *self.configured)}
        uses_nccl = self.network.facts.gpus or self.network.hcas.ports
        return [left for left in LEFT_ALONE if left.name not in taken] if uses_nccl else []

    @property
    def node(self) -> str:
        return self.network.facts.node

    @property
    def variables(self) -> dict[str, str]:
        """Name to value, for processes on the node."""
        return variables(self.values)


def render_node(
    facts: NodeFacts,
    site: Site,
    *,
    method: str = DEFAULT_METHOD,
    ranks: int | None = None,
) -> NodeEnvironment:
    """The node's environment. `ranks` on this node, None for the site's number, else one per GPU, or one."""
    interface = choose_interface(facts, wanted=site.network.interface, mtu=site.network.mtu)
    hcas = choose_hcas(facts, wanted=site.network.hcas, rate_gbps=site.network.port_rate_gbps)
    values = (
        *socket_values(interface),
        # Without a GPU and an adapter NCCL is not used.
        *(adapter_values(hcas, gid_index=site.network.gid_index) if facts.gpus or hcas.ports else ()),
        *process_values(
            device="cuda" if facts.gpus else "cpu",
            cores=facts.cores or 1,
            ranks=ranks or site.ranks_per_node or len(facts.gpus) or 1,
            method=method,
            compute_capability=min(
                (gpu.compute_capability for gpu in facts.gpus if gpu.compute_capability), default=None
            ),
        ),
    )
    own, warnings = site_variables(site)
    concerns = [sentence for name, value in own.items() if (sentence := concern(name, value))]
    rendered = overlaid(values, own, by="set by the site file", origin="site")
    taken, replaced = configured(facts.nccl_conf, rendered)
    concerns += [f"{value.reason}: {said}" for value in taken if (said := concern(value.name, value.value))]
    concerns += [f"NCCL is given {path}, which cannot be read on this node; install it there" for path in facts.absent]
    return NodeEnvironment(
        values=rendered,
        network=NodeNetwork(facts=facts, interface=interface, hcas=hcas),
        warnings=(*facts.unread, *interface.warnings, *hcas.warnings, *warnings, *replaced, *concerns),
        configured=taken,
    )


def site_variables(site: Site) -> tuple[dict[str, str], list[str]]:
    """The site's own variables without RAY_USAGE_STATS_ENABLED, and a warning where the site sets it."""
    own = dict(site.environment)
    if own.pop(USAGE_REPORTS, "0") != "0":
        return own, [f"the site sets {USAGE_REPORTS}, which stays 0: nothing started here reports; remove it"]
    return own, []


def env_sh(environment: NodeEnvironment) -> str:
    """The node's environment as a POSIX shell script that only sets variables."""
    node = printable(environment.node)  # a line break would end the comment and begin a command
    lines = [
        f"# Environment of {node}, rendered by `burst cluster env`. To be sourced; it sets variables and does nothing "
        "else.",
    ]
    for value in environment.values:
        lines += ["", f"# {value.origin}: {printable(value.reason)}", f"export {value.name}={_quoted(value.value)}"]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """The value as one word of any shell; zsh alone would read an unquoted `=name` as the path of a program."""
    return value if _PLAIN.fullmatch(value) else "'" + value.replace("'", "'\"'\"'") + "'"


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


def as_json(environment: NodeEnvironment) -> dict[str, object]:
    """Everything known about the node's environment; keys are only ever added."""

    def described(value: Variable) -> dict[str, str]:
        return {"name": value.name, "value": shown(value.name, value.value)}

    return {
        "node": environment.node,
        "variables": [
            {**described(value), "origin": value.origin, "reason": value.reason} for value in environment.values
        ],
        "ports": [
            {"name": port.name, "used": port.kept, "reason": port.reason} for port in environment.network.hcas.ports
        ],
        "nccl_conf": [{**described(value), "place": value.reason} for value in environment.configured],
        "left_alone": [
            {"name": left.name, "default": left.default, "reason": left.reason} for left in environment.left_alone
        ],
        "warnings": list(environment.warnings),
    }
