"""Shared memory: is there room for the buffers that NCCL and data loaders share between processes?"""

from __future__ import annotations

import re

from cluster.checks import BoardCheck
from cluster.files.errors import quantity
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict
from cluster.profiles import NO_GPUS, Board

GIB_PER_GPU = 1.0
_PATH = "/dev/shm"  # noqa: S108 - looked at, never written to
PROBE = Probe(script=f"df -P -k {_PATH}")
_ROW = re.compile(r"\s(\d+)\s+\d+\s+(\d+)\s+(?:\d+%|-)\s+/.*$", re.MULTILINE)


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Warns below 1 GiB for each GPU; a container has 64 MiB by default."""
    match = _ROW.search(output.text)
    if not match:
        return Verdict(level="unknown", summary=f"{_PATH} cannot be read ({output.first_line})")
    free_gib = int(match[2]) / 2**20
    wanted = GIB_PER_GPU * (board.count or site.gpus.count or 0)
    if free_gib < wanted:
        return Verdict(
            level="warn",
            summary=f"{_PATH} has {quantity(free_gib)} GiB left, expected {wanted:g}; enlarge it (docker: --ipc=host)",
            action="monitor",
        )
    return Verdict(level="ok", summary=f"{_PATH} has {quantity(free_gib)} GiB left")


CHECK = BoardCheck(
    source="NCCL troubleshooting, shared memory; 1 GiB for each GPU is this project's judgement",
    probe=lambda site: PROBE,
    judge=judge,
)
