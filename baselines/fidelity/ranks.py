"""Start one program as the ranks of a group on this machine, and wait for all or for the first that fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from baselines.upstream import foreign_environment

_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 5.0  # for ranks that wait for one that failed


def run_ranks(
    command: Sequence[str], environment: Mapping[str, str], world_size: int, folder: Path, seconds: float
) -> str:
    """Run `command` on gloo ranks with torchrun's variables; their output goes to FOLDER/rank<r>.log.

    Returns "" when all ended with code 0, else one sentence. No process of the ranks outlives the call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        common = {
            "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port.getsockname()[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": "lo", **environment,
        }  # fmt: skip
    programs = [Path(command[0]).parent]
    processes = []
    try:
        for rank in range(world_size):
            own = foreign_environment(os.environ, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, programs)
            with open(folder / f"rank{rank}.log", "w", encoding="utf-8") as log:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=own,
                        cwd=folder,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )
        return _wait(processes, seconds, folder)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def own_environment() -> dict[str, str]:
    """What this program's own interpreter needs to find our packages."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float, folder: Path) -> str:
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes):
        if time.monotonic() > end:
            if any(process.poll() for process in processes):
                break
            return f"the ranks did not end within {seconds:g} s{last_line(folder)}"
        if any(process.poll() for process in processes):
            end = min(end, time.monotonic() + _GRACE_SECONDS)
        time.sleep(_LOOK_SECONDS)
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if not failed:
        return ""
    code = processes[failed[0]].returncode
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"rank {failed[0]} {ended}{last_line(folder, failed[0])}"


def last_line(folder: Path, rank: int = 0) -> str:
    """The last line that a rank printed, as the end of a sentence."""
    lines = (folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f": {lines[-1].strip()[:200]}" if lines else ""
