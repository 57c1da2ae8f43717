"""The environments of many nodes: read from all at once, compared, and installed as env.sh when asked.

A file is written to a node whole or not at all, and the file it replaces is kept beside it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.discovery.drift import network_drift
from cluster.discovery.read import read_node
from cluster.environment.ranks import DEFAULT_METHOD
from cluster.environment.rendering import NodeEnvironment, as_json, env_sh, render_node
from cluster.environment.value import is_secret
from cluster.files.errors import UsageError
from cluster.inventory.nodes import InventoryNode
from cluster.probing.probe import Output
from cluster.transport.fleet import on_each
from cluster.transport.runner import Connect, Runner, Unreachable
from cluster.transport.transfer import TransferFailed, put


@dataclass(frozen=True, kw_only=True, slots=True)
class SurveyOptions:
    """The options of a survey, the same on all nodes."""

    head: str | None = None  # IPv4 address of the head node; None: this machine alone
    method: str = DEFAULT_METHOD
    install: str | None = None  # path on the nodes to write env.sh to; None: nothing is written


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The results, in the order of the nodes."""

    environments: tuple[NodeEnvironment, ...]
    installed: dict[str, Installed]  # by node
    silent: dict[str, str]  # nodes that did not answer, or could not be written to, and the reason

    @property
    def drift(self) -> list[str]:
        """Differences between the nodes that answered."""
        return network_drift([environment.network for environment in self.environments])

    def as_json(self) -> dict[str, object]:
        """Everything that was found; keys are only ever added."""
        nodes = []
        for environment in self.environments:
            done = self.installed.get(environment.node)
            installed = done and {"path": done.path, "what": done.what, "kept": done.kept or None}
            nodes.append({**as_json(environment), "installed": installed})
        return {"nodes": nodes, "drift": self.drift, "silent": self.silent}


def survey(nodes: Sequence[InventoryNode], connect: Connect, options: SurveyOptions, seconds: float) -> Survey:
    """Read every node's facts, within `seconds` each, and install env.sh where `options` has a path for it."""

    def work(node: InventoryNode) -> tuple[NodeEnvironment, Installed | Unreachable | None]:
        with connect(node.host, seconds) as runner:
            facts = read_node(node.name, runner, node.site, head=options.head, deadline_seconds=seconds)
            rendered = render_node(facts, node.site, method=options.method)
            if options.install is None:
                return rendered, None
            try:
                return rendered, install(runner, rendered, options.install, deadline_seconds=seconds)
            except Unreachable as error:
                return rendered, error

    answers = {node.name: answer for node, answer in on_each(nodes, work, seconds)}
    environments, installed, silent = [], {}, {}
    for node in nodes:
        answer = answers[node.name]
        if isinstance(answer, Unreachable):
            silent[node.name] = str(answer)
            continue
        environments.append(answer[0])
        if isinstance(answer[1], Unreachable):
            silent[node.name] = str(answer[1])
        elif answer[1] is not None:
            installed[node.name] = answer[1]
    return Survey(environments=tuple(environments), installed=installed, silent=silent)


def head_address(named: str | None, nodes: Sequence[InventoryNode]) -> str | None:
    """IPv4 address of the head: `named`, else the first node's; None on this machine alone. Raises UsageError."""
    name = named if named is not None else nodes[0].host.address
    if not name:
        return None
    try:
        found = socket.getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
        return str(ipaddress.IPv4Address(found[0][4][0]))
    except (OSError, ValueError):
        raise UsageError(
            f"the head {name} has no IPv4 address known here; give --head the address the other nodes reach it at"
        ) from None


# Arguments: path, SHA-256 of the new content. Makes the folder, and keeps a copy of the file to be replaced.
_MAKE_WAY = """\
set -eu
[ ! -d "$1" ] || { echo "$1 is a folder" >&2; exit 3; }
mkdir -p -- "$(dirname -- "$1")"
if [ ! -e "$1" ] && [ ! -L "$1" ]; then echo written; exit 0; fi
if [ ! -L "$1" ] && [ "$(sha256sum < "$1" | cut -d' ' -f1)" = "$2" ]; then echo unchanged; exit 0; fi
kept=$1.$(date +%Y%m%d-%H%M%S).$$
cp -pP -- "$1" "$kept"
printf 'replaced %s\\n' "$kept"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """The result of one installation."""

    path: str
    what: Literal["written", "replaced", "unchanged"]
    kept: str = ""  # where the file that was replaced is now

    @property
    def sentence(self) -> str:
        if self.what == "replaced":
            return f"{self.path} replaced; the earlier one is {self.kept}"
        return f"{self.path} {'is up to date' if self.what == 'unchanged' else 'written'}"


def install(runner: Runner, environment: NodeEnvironment, path: str, *, deadline_seconds: float) -> Installed:
    """Write the node's env.sh to an absolute `path` there, readable by all unless it holds a secret.

    Raises Unreachable with the machine's own message when that fails; a file at `path` is then unchanged.
    """
    content = env_sh(environment).encode()
    mode = 0o600 if any(is_secret(value.name, value.value) for value in environment.values) else 0o644
    command = ["env", "LC_ALL=C", "sh", "-c", _MAKE_WAY, "sh", path, hashlib.sha256(content).hexdigest()]
    done = runner.run(command, deadline_seconds=deadline_seconds)
    what, _, kept = done.stdout.rstrip("\n").partition(" ")
    if done.exit_status != 0 or what not in ("written", "replaced", "unchanged"):
        complaint = Output(text=done.stderr).first_line or "no answer in time"
        raise Unreachable(f"{path} was not written ({complaint}); check the path and its folder")
    if what != "unchanged":
        try:
            put(runner, content, path, deadline_seconds=deadline_seconds, mode=mode)
        except TransferFailed as error:
            raise Unreachable(str(error)) from None
    return Installed(path=path, what=what, kept=kept)  # type: ignore[arg-type]  # one of the three, as just checked
