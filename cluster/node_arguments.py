"""Options that name nodes. A file of its own, so that `--help` loads neither YAML nor SSH."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_node_arguments(parser: argparse.ArgumentParser, timeout_seconds: float = 60.0) -> None:
    """Add the options that name nodes, and those for logging in to them."""
    parser.add_argument(
        "nodes",
        nargs="*",
        metavar="INVENTORY|NODE",
        help="an inventory file, then names of its nodes for only these; or [user@]host[:port]; ranges as gpu[01-04]; "
        "none: this machine",
    )
    parser.add_argument("--site", type=Path, metavar="FILE", help="a site file, instead of the inventory's own")
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
    """Add the options for trusted host keys."""
    parser.add_argument(
        "--known-hosts", type=Path, metavar="FILE", help="host keys; default: the site's ssh.known_hosts, or ~/.ssh's"
    )
    parser.add_argument(
        "--accept-new-host-keys", action="store_true", help="add unknown hosts to known_hosts; changed keys stay errors"
    )
