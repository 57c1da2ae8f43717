"""Options of commands that ask nodes something. A file of its own, because `--help` needs neither YAML nor SSH."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_node_arguments(parser: argparse.ArgumentParser, timeout_seconds: float = 60.0) -> None:
    """Which nodes, and how they are logged in to."""
    parser.add_argument(
        "nodes",
        nargs="*",
        metavar="INVENTORY|NODE",
        help="an inventory file, then names of its nodes for only these; or [user@]host[:port]; ranges as gpu[01-04]; "
        "none: this machine",
    )
    parser.add_argument("--site", type=Path, metavar="FILE", help="what nodes are like; instead of an inventory's own")
    parser.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="private key, in place of the site's ssh.key; default: that, the agent, ~/.ssh",
    )
    add_host_key_arguments(parser)
    parser.add_argument(
        "--timeout", type=float, default=timeout_seconds, metavar="SECONDS",
        help=f"per node (default: {timeout_seconds:g})",
    )  # fmt: skip


def add_host_key_arguments(parser: argparse.ArgumentParser) -> None:
    """Which host keys are trusted."""
    parser.add_argument("--known-hosts", type=Path, metavar="FILE", help="host keys; default: ~/.ssh/known_hosts")
    parser.add_argument(
        "--accept-new-host-keys", action="store_true", help="add unknown hosts to known_hosts; changed keys stay errors"
    )
