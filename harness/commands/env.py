"""`burst env`: the environment of each node with the reason for every value; writes env.sh, or takes one over."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base.errors import UsageError

if TYPE_CHECKING:
    from cluster.environment.rendering import NodeEnvironment


class EnvCommand:
    help = "render each node's environment (interfaces, adapters, per-method values) with reasons, or import an env.sh"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        from cluster.node_arguments import add_node_arguments

        add_node_arguments(parser)
        parser.add_argument(
            "--head", metavar="ADDRESS", help="the address that routes of other nodes lead to; default: the first node"
        )
        parser.add_argument(
            "--method", default="burst", metavar="NAME", help="render this method's values (default: burst)"
        )
        parser.add_argument(
            "--ranks", type=int, metavar="N", help="ranks per node; default: the site's number, else one per GPU"
        )
        parser.add_argument(
            "--logs", metavar="DIR", help="folder on the nodes for NCCL's and the flight recorder's files"
        )
        parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
        parser.add_argument("--all", action="store_true", help="also what is left to NCCL on purpose, with the reasons")
        output = parser.add_mutually_exclusive_group()
        output.add_argument("--write", type=Path, metavar="DIR", help="leave DIR/<node>/env.sh on this machine")
        output.add_argument(
            "--install", metavar="PATH", help="write PATH on each node; a file that differs is kept aside"
        )
        output.add_argument(
            "--import", dest="source", type=Path, metavar="FILE", help="judge an existing env.sh; prints a site file"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        if arguments.source:
            return _import(arguments)
        return _render(arguments)


def _render(arguments: argparse.Namespace) -> int:
    from cluster.environment.show import as_json, table
    from cluster.environment.survey import Wish, head_address, survey
    from cluster.inventory.file import named_nodes
    from cluster.transport.reach import connection
    from harness.spec.methods import method_named

    method_named(arguments.method)
    if arguments.ranks is not None and not 1 <= arguments.ranks <= 1024:
        raise UsageError(f"--ranks is {arguments.ranks}; expected 1 to 1024 ranks per node")
    for option, path in (("--install", arguments.install), ("--logs", arguments.logs)):
        if path is not None and not path.startswith("/"):
            raise UsageError(f"{option} is {path}; expected an absolute path on the nodes")
    inventory = named_nodes(arguments)
    connect = connection(
        [node.host for node in inventory.nodes],
        known_hosts=arguments.known_hosts,
        accept_new_host_keys=arguments.accept_new_host_keys,
    )
    wish = Wish(
        head=head_address(arguments.head, inventory.nodes),
        method=arguments.method,
        ranks=arguments.ranks,
        logs=arguments.logs,
        install=arguments.install,
    )
    found = survey(inventory.nodes, connect, wish, arguments.timeout)
    if arguments.json:
        print(json.dumps(as_json(found), indent=1, allow_nan=False))
    else:
        print("\n\n".join(table(environment, every_one=arguments.all) for environment in found.environments))
    said = [f"warning: {sentence}" for sentence in found.drift]
    said += [f"{node}: {installed.sentence}" for node, installed in found.installed.items()]
    said += [f"{node}: {reason}" for node, reason in found.silent.items()]
    if arguments.write:
        said += _write(arguments.write, found.environments)
    for sentence in said:
        print(sentence, file=sys.stderr)
    return 1 if found.silent else 0


def _write(folder: Path, environments: Sequence[NodeEnvironment]) -> list[str]:
    """Leave each node's env.sh below `folder`; returns one sentence for each."""
    from cluster.environment.survey import install
    from cluster.transport.reach import LocalRunner
    from cluster.transport.runner import Unreachable

    said = []
    for environment in environments:
        path = folder.absolute() / environment.node / "env.sh"
        try:
            said.append(install(LocalRunner(), environment, str(path), deadline_seconds=60.0).sentence)
        except Unreachable as error:
            raise UsageError(str(error)) from None
    return said


def _import(arguments: argparse.Namespace) -> int:
    from cluster.environment.importing import import_env
    from cluster.environment.show import import_json, import_table
    from cluster.files.filesystem import read_text

    if arguments.nodes:
        raise UsageError("--import reads a file and connects to no node; leave the nodes out")
    text = read_text(arguments.source, "shell file")
    found = import_env(text, str(arguments.source))
    if arguments.json:
        print(json.dumps(import_json(found), indent=1))
        return 0
    # The fragment alone goes to stdout, so that it can be sent to a file.
    print(import_table(found), file=sys.stderr)
    print(found.site_fragment(), end="")
    return 0


COMMAND = EnvCommand()
