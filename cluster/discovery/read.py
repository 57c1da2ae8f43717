"""Running discovery's probes on a node: one command, one round trip."""

from __future__ import annotations

import secrets
import sys

from cluster.discovery.facts import NodeFacts
from cluster.discovery.parse import parse
from cluster.discovery.script import probes
from cluster.inventory.site import Site
from cluster.probing.probe import Output, parse_outputs, render_script
from cluster.transport.runner import Runner, Unreachable


def read_node(
    node: str, runner: Runner, site: Site, *, head: str | None, deadline_seconds: float, root: str = ""
) -> NodeFacts:
    """Ask one node. `head` is the head node's IPv4 address, None on a machine that works alone; `root` is put before
    /sys and /proc. Raises Unreachable when the connection breaks or the node's shell runs nothing."""
    python = site.software.python or sys.executable
    questions = probes(head=head, storage=site.storage.servers, python=python, root=root)
    mark = secrets.token_hex(8)
    completed = runner.run(["sh", "-s"], stdin=render_script(questions, mark), deadline_seconds=deadline_seconds)
    outputs = parse_outputs(completed.stdout, mark)
    if not outputs:
        complaint = Output(text=completed.stderr).first_line or "no output"
        raise Unreachable(f"{node} answered, but its shell ran no probe ({complaint}); log in and try sh there")
    # A probe of which nothing came back was still waiting when the connection's deadline passed.
    silent = {name: Output(text="", exit_status=None) for name in questions if name not in outputs}
    return parse(node, {**outputs, **silent})
