"""--nodes and what goes with it: how commands that may use a cluster are told which."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.node_arguments import add_host_key_arguments


def add_cluster_arguments(parser: argparse.ArgumentParser, *, nodes_help: str) -> None:
    parser.add_argument("--nodes", type=Path, metavar="FILE", help=nodes_help)
    add_state_argument(parser)
    add_host_key_arguments(parser)


def add_state_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state", type=Path, metavar="DIR",
        help="where the cluster that is up is remembered (default: ~/.local/state/burst/cluster)",
    )  # fmt: skip


def state_directory(arguments: argparse.Namespace) -> Path:
    """The folder that `--state` names."""
    from cluster.ray_cluster.state import default_directory

    return arguments.state or default_directory()
