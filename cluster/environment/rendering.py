"""From a node's facts and its site to the node's environment, and to the text of env.sh."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import jinja2

from cluster.discovery.drift import NodeNetwork
from cluster.discovery.facts import NodeFacts
from cluster.discovery.hcas import choose_hcas
from cluster.discovery.interface import choose_interface
from cluster.environment.nccl import LeftAlone, configured, left_alone
from cluster.environment.ranks import DEFAULT_METHOD, adapter_values, process_values, socket_values, trial_values
from cluster.environment.rules import concern
from cluster.environment.value import Value, overlaid, variables
from cluster.inventory.site import Site
from cluster.inventory.software import USAGE_REPORTS
from cluster.probing.probe import printable

_TEMPLATES = Path(__file__).parent / "templates"
_PLAIN = re.compile(r"[A-Za-z0-9_.,:%/-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEnvironment:
    """Everything `burst env` shows about one node."""

    values: tuple[Value, ...]
    network: NodeNetwork
    warnings: tuple[str, ...]
    configured: tuple[Value, ...] = ()  # what NCCL takes from its own files, which env.sh need not repeat

    @property
    def left_alone(self) -> list[LeftAlone]:
        """Variables of NCCL that nothing here sets; none on a node that does not use NCCL."""
        names = [value.name for value in (*self.values, *self.configured)]
        return left_alone(names) if self.network.facts.gpus or self.network.hcas.ports else []

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
    logs: str | None = None,
) -> NodeEnvironment:
    """The node's environment. `ranks` on this node, None for the site's number, else one per GPU; `logs` is the folder
    for files of NCCL and the flight recorder, None leaves them to each trial."""
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
        *(trial_values(logs) if logs else ()),
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
    return template("env.sh.j2").render(node=environment.node, values=environment.values)


def template(name: str) -> jinja2.Template:
    """One of our templates, with the filters that keep a value from being read as anything but a value."""
    # The templates are shell and YAML, for which HTML's escaping would be wrong; each has its own filter.
    renderer = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    renderer.filters["shell"] = _quoted
    renderer.filters["comment"] = printable  # a line break would end the comment and begin a command
    return renderer.get_template(name)


def _quoted(value: str) -> str:
    """The value as one word of any shell; zsh alone would read an unquoted `=name` as the path of a program."""
    return value if _PLAIN.fullmatch(value) else "'" + value.replace("'", "'\"'\"'") + "'"
