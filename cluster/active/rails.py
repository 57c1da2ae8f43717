"""Bandwidth of each adapter alone, from GPU memory to GPU memory, by perftest's ib_write_bw where it is installed.

An exchange of all GPUs does not show one slow adapter among eight. A rail is one port of an adapter with its nearest
GPU. One node runs a listener for each rail, on a TCP port of its own; the other calls one listener after another.
Source: linux-rdma/perftest; message size and the loopback of a single node: Azure/azurehpc-health-checks.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

PROGRAM = "ib_write_bw"
ABSENT = f"{PROGRAM} is not installed on the node"
MESSAGE_BYTES = 8 * 2**20
SECONDS = 3  # of each rail
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin"
# Bytes, iterations, peak and average in Gb/s, then the rate of messages.
_RESULT = re.compile(rf"^\s*{MESSAGE_BYTES}\s+\d+\s+[\d.]+\s+([\d.]+)\s", re.MULTILINE)
_RAIL = re.compile(r"([A-Za-z0-9_.-]+):(\d+)=(\d*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rail:
    """One port and the GPU that is nearest to it."""

    port: str  # mlx5_0:1
    gpu: int | None = None  # None: host memory, on a node without GPUs
    rate_gbps: float | None = None

    @property
    def argument(self) -> str:
        """The rail in a worker's argument --rails: `mlx5_0:1=0`."""
        return f"{self.port}={'' if self.gpu is None else self.gpu}"


def parse_rails(text: str) -> list[Rail]:
    """Rails from a worker's argument. Raises ValueError for any other text."""
    rails = []
    for part in text.split(","):
        match = _RAIL.fullmatch(part)
        if not match:
            raise ValueError(f"--rails has {part!r}; expected names such as mlx5_0:1=0")
        rails.append(Rail(port=f"{match[1]}:{match[2]}", gpu=int(match[3]) if match[3] else None))
    return rails


def unavailable() -> str:
    """The reason why no rail can be measured here; empty when they can."""
    return "" if _program() else f"{ABSENT}; install perftest"


def takes_gpus() -> bool:
    """True when this build of the program can use the memory of a GPU. Raises RuntimeError when it does not answer."""
    program = _program()
    assert program is not None
    try:
        done = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=20.0, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{PROGRAM} --help gave no answer within 20 s") from None
    return "--use_cuda" in done.stdout + done.stderr


def free_ports(count: int) -> list[int]:
    """Free TCP ports; another program can still take one before it is used, which fails that rail alone."""
    held = [socket.create_server(("", 0)) for _ in range(count)]
    ports: list[int] = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


def listen(rails: Sequence[Rail], ports: Sequence[int], gpus: bool) -> list[subprocess.Popen[str]]:
    """A listening program for each rail; each ends with its first client, and with the process group of this one.

    `gpus` is what `takes_gpus` says.
    """
    return [
        subprocess.Popen(_command(rail, port, gpus), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)
        for rail, port in zip(rails, ports, strict=True)
    ]


def measure(rail: Rail, port: int, peer: str, gpus: bool) -> float | str:
    """Average Gb/s of one rail to the one that listens at `peer`, or the reason why there is none; `gpus` as above."""
    try:
        done = subprocess.run(
            [*_command(rail, port, gpus), peer],
            capture_output=True, text=True, timeout=SECONDS + 20.0, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{PROGRAM} gave no result within {SECONDS + 20} s"
    result = _RESULT.search(done.stdout)
    if done.returncode == 0 and result:
        return float(result[1])
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip(" -\t")]
    return (lines[-1] if lines else f"{PROGRAM} ended with status {done.returncode}")[:200]


def _command(rail: Rail, port: int, gpus: bool) -> list[str]:
    program = _program()
    assert program is not None
    device, _, number = rail.port.partition(":")
    memory = [f"--use_cuda={rail.gpu}"] if gpus and rail.gpu is not None else []
    return [
        program, "-d", device, "-i", number, "-p", str(port), "-s", str(MESSAGE_BYTES), "-D", str(SECONDS), "-F",
        "--report_gbits", *memory,
    ]  # fmt: skip


def _program() -> str | None:
    return shutil.which(PROGRAM) or shutil.which(PROGRAM, path=_PATH)  # a command over SSH gets a short PATH
