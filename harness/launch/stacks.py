"""Where ranks are when they make no progress: a stack of each in the trial's stacks/, and NCCL's flight recorder.

py-spy reads the stacks of a running process and of those it started, in any program written in Python. Where it is not
installed or may not trace, a rank of the engine writes its own stack to its log when it is sent SIGTERM (faulthandler).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

STACKS_DIRECTORY = "stacks"  # of a trial: rank<r>.txt
PY_SPY_SECONDS = 20.0  # for one process; it stops it while it reads
RECORDER_SECONDS = 5.0  # for the flight recorder, whose thread looks once a second whether it is asked
NAMED_PLACES = 4  # of ranks in one sentence

# `    wait (threading.py:320)` of py-spy, and `  File "threading.py", line 320 in wait` of faulthandler.
_PY_SPY_FRAME = re.compile(r"^ {4}(?P<function>.+) \((?P<file>.+):(?P<line>\d+)\)$")
_FAULTHANDLER_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_FAULTHANDLER_STARTS = ("Current thread 0x", "Thread 0x")


def py_spy() -> str | None:
    """The path of py-spy beside this interpreter or on PATH; None where it is not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def dump_stacks(pids: Mapping[int, int], folder: Path) -> dict[int, str]:
    """Write the stack of each rank's process, by py-spy, to folder/rank<r>.txt; returns by rank where it is.

    A rank is left out where py-spy is not installed, or may not read that process.
    """
    program = py_spy()
    if program is None or not pids:
        return {}
    places = {}
    running = {
        rank: subprocess.Popen(
            [program, "dump", "--subprocesses", "--pid", str(pid)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
        )
        for rank, pid in pids.items()
    }  # fmt: skip
    give_up = time.monotonic() + PY_SPY_SECONDS
    for rank, process in running.items():
        try:
            text, _ = process.communicate(timeout=max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:  # a process in a driver call cannot be stopped
            process.kill()
            process.communicate()
            continue
        if process.returncode == 0 and (place := _place(text, _PY_SPY_FRAME, "MainThread")):
            _write(folder, rank, text)
            places[rank] = place
    return places


def log_sizes(ranks: Iterable[int], logs: Path) -> dict[int, int]:
    """Bytes of each rank's log now, so that `stacks_in_logs` reads what comes after."""
    return {rank: path.stat().st_size for rank in ranks if (path := logs / f"rank{rank}.log").exists()}


def stacks_in_logs(sizes: Mapping[int, int], logs: Path, folder: Path) -> dict[int, str]:
    """Copy the stacks that ranks wrote to their logs since `log_sizes` to folder/rank<r>.txt; returns places."""
    places = {}
    for rank, size in sizes.items():
        with open(logs / f"rank{rank}.log", "rb") as file:
            file.seek(size)
            lines = file.read().decode("utf-8", errors="replace").splitlines()
        first = next((number for number, line in enumerate(lines) if line.startswith(_FAULTHANDLER_STARTS)), None)
        if first is None:
            continue
        text = "\n".join(lines[first:]) + "\n"
        if place := _place(text, _FAULTHANDLER_FRAME, "Current thread"):
            _write(folder, rank, text)
            places[rank] = place
    return places


def ask_flight_recorder(pipes: Path, logs: Path) -> None:
    """Have NCCL's flight recorder of each rank write the collectives it remembers, into `logs`.

    torch listens at a named pipe per rank in `pipes` (TORCH_NCCL_DEBUG_INFO_PIPE_FILE).
    """
    asked = 0
    since = time.time()
    for pipe in pipes.glob("*.pipe"):
        with contextlib.suppress(OSError):  # its reader is gone, or never came
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(descriptor, b"1\n")
                asked += 1
            finally:
                os.close(descriptor)
    give_up = time.monotonic() + RECORDER_SECONDS
    while asked and len(_written_since(logs, since)) < asked and time.monotonic() < give_up:
        time.sleep(0.1)


def places_sentence(places: Mapping[int, str], silent: Sequence[int] = ()) -> str:
    """Where the ranks are, the fewest first: one rank that is elsewhere than all others is the one they wait for.

    Ranks that run but have left no stack (`silent`) come first: a stopped process cannot write one. Empty where no rank
    has a place.
    """
    if not places:
        return ""
    ranks_at: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks_at.setdefault(place, []).append(rank)
    groups = sorted(ranks_at.items(), key=lambda item: (len(item[1]), item[1]))
    said = [f"{_ranks(silent)} left no stack"] if silent else []
    said += [f"{_ranks(there)} at {place}" for place, there in groups[:NAMED_PLACES]]
    more = sum(len(there) for _, there in groups[NAMED_PLACES:])
    return ", ".join(said) + (f", {more} more elsewhere" if more else "")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= NAMED_PLACES else f"{len(ranks)} ranks"


def _place(text: str, frame: re.Pattern[str], thread: str) -> str:
    """The innermost frame of the thread whose heading has `thread`, else of the first one; empty for none."""
    lines = text.splitlines()
    heading = next((number for number, line in enumerate(lines) if thread in line), 0)
    found = next((match for line in lines[heading:] if (match := frame.match(line))), None)
    return f"{found['function']} ({Path(found['file']).name}:{found['line']})" if found else ""


def _write(folder: Path, rank: int, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"rank{rank}.txt").write_text(text, encoding="utf-8")


def _written_since(folder: Path, since: float) -> list[Path]:
    return [path for path in folder.glob("flight_rank*") if path.stat().st_mtime >= since - 1.0]
