"""`burst env`: the environment of each node with the reason for every value; writes env.sh there."""

from __future__ import annotations

import argparse
import json
import sys

from harness.base.errors import UsageError


class EnvCommand:
    help = "render each node's environment (interfaces, adapters, per-method values) with reasons"
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
        parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
        parser.add_argument("--all", action="store_true", help="also what is left to NCCL on purpose, with the reasons")
        parser.add_argument(
            "--install", metavar="PATH", help="write PATH on each node; a file that differs is kept aside"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from cluster.environment.rendering import table
        from cluster.environment.survey import SurveyOptions, head_address, survey
        from cluster.inventory.file import named_nodes
        from cluster.transport.reach import connection
        from harness.spec.methods import method_named

        method_named(arguments.method)
        if arguments.install is not None and not arguments.install.startswith("/"):
            raise UsageError(f"--install is {arguments.install}; expected an absolute path on the nodes")
        inventory = named_nodes(arguments)
        connect = connection(
            [node.host for node in inventory.nodes],
            known_hosts=arguments.known_hosts,
            accept_new_host_keys=arguments.accept_new_host_keys,
        )
        options = SurveyOptions(
            head=head_address(arguments.head, inventory.nodes),
            method=arguments.method,
            install=arguments.install,
        )
        found = survey(inventory.nodes, connect, options, arguments.timeout)
        if arguments.json:
            print(json.dumps(found.as_json(), indent=1, allow_nan=False))
        else:
            print("\n\n".join(table(environment, every_one=arguments.all) for environment in found.environments))
        said = [f"warning: {sentence}" for sentence in found.drift]
        said += [f"{node}: {installed.sentence}" for node, installed in found.installed.items()]
        said += [f"{node}: {reason}" for node, reason in found.silent.items()]
        for sentence in said:
            print(sentence, file=sys.stderr)
        return 1 if found.silent else 0


COMMAND = EnvCommand()
