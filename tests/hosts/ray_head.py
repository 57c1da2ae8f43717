"""A Ray cluster of one node on this machine's loopback, as `ray start` makes it, for tests that join it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.launch.ports import answers
from tests.patience import AMPLE, wait_until

PROJECT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class RayHead:
    """`environment` is that of the programs that join: the token, and loopback in place of this machine's address."""

    address: str
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def ray_head(cpus: int = 4, environment: Mapping[str, str] | None = None, port: int | None = None) -> Iterator[RayHead]:
    """`environment` is added to this process's own; `port` None takes a free one."""
    folder = tempfile.mkdtemp(prefix="burst-test-ray-", dir="/tmp")  # its sockets' paths are to be short
    token = Path(folder, "token")
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    joining = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray then stays on 127.0.0.1
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = port or free.getsockname()[1]
    own = {
        **os.environ,
        "PYTHONPATH": str(PROJECT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "SPT_NOENV": "1",
        **joining,
        **(environment or {}),
    }
    with open(f"{folder}/log", "wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-u", "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *("--node-ip-address=127.0.0.1", f"--port={port}", f"--num-cpus={cpus}", "--num-gpus=0"),
                *("--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}/ray"),
                f"--object-store-memory={100 * 2**20}",
            ],
            env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        wait_until(
            lambda: process.poll() is not None or b"Ray runtime started" in Path(folder, "log").read_bytes(),
            "Ray has not started",
        )
        assert answers("127.0.0.1", port), Path(folder, "log").read_text()
        yield RayHead(address=f"127.0.0.1:{port}", environment=joining, process=process)
    finally:
        process.terminate()
        process.wait(AMPLE)
        shutil.rmtree(folder, ignore_errors=True)
