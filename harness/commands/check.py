"""`burst check`: node health, the same program as check_nodes.py."""

from __future__ import annotations

import argparse


class CheckCommand:
    help = "check the health of nodes; see burst check --help"
    forwards = True

    def configure(self, parser: argparse.ArgumentParser) -> None:
        pass

    def run(self, arguments: argparse.Namespace) -> int:
        from cluster.cli import main

        return main(arguments.rest, prog="burst check")


COMMAND = CheckCommand()
