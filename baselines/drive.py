"""`python -m baselines.drive TRIAL_DIR`: one rank of a compared system, started by the launcher as any rank is.

Reads TRIAL_DIR/trial.json, has the adapter render the system's command, and runs it: in the same process group, with
the same log, in the system's own environment. Rank 0 leaves upstream.json, which says what was started. Steps that the
program prints go to progress.jsonl. Each rank leaves host_memory/rank<r>.json, its program's largest resident set, and
one with a GPU gpus/rank<r>.json, the GPU's state before and after. A program that ran out of memory leaves
errors/rank<r>.json, so that its trial ends as `oom`, as one of the engine does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from baselines.handicaps import NCCL_VARIABLES, with_own_nccl
from baselines.install.places import InstallPlace
from baselines.tokens import write_tokens
from baselines.upstream import (
    GPUS,
    HOST_MEMORY,
    LOGS,
    RAN_FILE,
    Rendered,
    ResidentMemory,
    StartedSystem,
    Upstream,
    WatchedGpu,
    foreign_environment,
    seconds_of,
)
from engine.atomic import write_atomic
from engine.measurement import PROGRESS_FILE, GpuState, write_json
from engine.memory.gpu_state import GpuReading, query_gpus, read_gpu_named, visible_gpus
from engine.reader import read_json, to_json
from engine.settings import TrialSettings, from_json

_LOOK_SECONDS = 0.5  # between looks at what the program has printed
_GPU_LOOK_SECONDS = 5.0  # between looks at its GPU, which tells a few steps and slows none
_KILL_SECONDS = 5.0  # between asking a program to end and ending it
_OUT_OF_MEMORY = re.compile(r"^.*(?:OutOfMemoryError|CUDA out of memory|CUDA error: out of memory).*$", re.MULTILINE)
_REASON_CHARACTERS = 200


def _trial(trial_dir: Path) -> dict[str, Any]:
    return cast(dict[str, Any], read_json(trial_dir / "trial.json"))


def settings_of(trial_dir: Path) -> TrialSettings:
    """The settings in trial.json. Raises FileNotFoundError, and ValueError for what is not a trial."""
    return from_json(TrialSettings, _trial(trial_dir)["settings"])


def main(words: Sequence[str]) -> int:
    """Run one rank; returns the program's exit code, and ends by the signal that ended it."""
    if len(words) != 1:
        print("usage: python -m baselines.drive TRIAL_DIR", file=sys.stderr)
        return 2
    trial_dir, rank = Path(words[0]), int(os.environ.get("RANK", "0"))
    settings = settings_of(trial_dir)
    method: Upstream = importlib.import_module(_trial(trial_dir)["method"]).METHOD
    place = method.place
    if (reason := place.not_installed_reason(method.system)) is not None:  # on this host; the plan looked at another
        write_error(trial_dir, rank, "refused", reason)
        return 1
    rendered = method.render(settings, trial_dir, place)
    given = dict(os.environ)
    if place.flavour == "paper":
        rendered, given = as_its_script(settings, rendered, given)
    for path, content in rendered.files.items():  # by every rank, since hosts may not share the directory
        written = write_atomic(trial_dir / path, content)
        if content.startswith("#!"):
            written.chmod(0o755)
    data = {}
    if settings.task == "train" and method.tokens:
        data = write_tokens(settings, method.steps(settings), method.tokens, trial_dir)
    device, look = _gpu(given)
    if rank == 0:
        kernel = method.kernel(settings, place, {**given, **rendered.environment})
        found = replace(ran(place, rendered, trial_dir, device, data), kernel=kernel)
        write_json(trial_dir / RAN_FILE, to_json(found))
    watch = GpuWatch(look) if look else None
    code, ended = _run(method, settings, rendered, given, trial_dir, rank, watch)
    # Of its children that were waited for, the program is the largest; Linux counts KiB. What starts a program counts
    # in the program's peak, so it is never below this process's own, half a GiB, which any program with torch exceeds.
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    write_json(trial_dir / HOST_MEMORY / f"rank{rank}.json", to_json(ResidentMemory(peak_rss_bytes=peak)))
    if watch:
        write_json(trial_dir / GPUS / f"rank{rank}.json", to_json(watch.seen()))
    if ended and rank == 0:
        before = cast(dict[str, Any], read_json(trial_dir / RAN_FILE))
        write_json(trial_dir / RAN_FILE, before | {"ended": ended})
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler to take away
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)  # the launcher tells a kill from a failure
    return code


def as_its_script(
    settings: TrialSettings, rendered: Rendered, given: Mapping[str, str]
) -> tuple[Rendered, dict[str, str]]:
    """One of the paper's copies, and the launcher's variables for it.

    As published, NCCL's variables are those of the system's own script alone. The program's variables have them too,
    because the record holds the program's.
    """
    found = with_own_nccl(settings, given)
    own = {name: found[name] for name in NCCL_VARIABLES if name in found}
    return replace(rendered, environment={**rendered.environment, **own}), found


class GpuWatch:
    """A rank's GPU from before its program starts. `look` reads it; `seen` is what the record keeps."""

    def __init__(self, look: Callable[[], GpuReading]) -> None:
        self._look = look
        self._before = look()
        self._after: GpuReading | None = None
        self._next, self._in_steps = time.monotonic() + _GPU_LOOK_SECONDS, False

    def while_running(self, steps_began: bool, steps_ended: bool) -> None:
        """Look, if it is time: once as soon as a step has been told, and then now and then until the last one is."""
        first = steps_began and not self._in_steps
        if first or (time.monotonic() >= self._next and not steps_ended):
            self._after = self._look()
            self._next, self._in_steps = time.monotonic() + _GPU_LOOK_SECONDS, steps_began

    def seen(self) -> WatchedGpu:
        """After the program has ended."""
        after = self._after or self._look()
        driver = after.driver or self._before.driver
        return WatchedGpu(digest=after.digest, driver=driver, before=self._before.state, after=after.state)


def _run(
    method: Upstream,
    settings: TrialSettings,
    rendered: Rendered,
    given: Mapping[str, str],
    trial_dir: Path,
    rank: int,
    watch: GpuWatch | None,
) -> tuple[int, str]:
    """The program to its end: its exit code, and one sentence where it had to be ended after its last step.

    Its output goes where this process's goes, which is the rank's log. `given` are the launcher's variables.
    """
    sys.stdout.flush()
    process = subprocess.Popen(
        rendered.command,
        cwd=rendered.folder or trial_dir,
        env=foreign_environment(given, rendered.environment, [trial_dir / "bin", method.place.python.parent]),
        stdin=subprocess.DEVNULL,
    )
    log = trial_dir / LOGS / f"rank{rank}.log"
    told, end_at, ended = 0, math.inf, ""
    code: int | None = None
    with open(trial_dir / PROGRESS_FILE, "a+", encoding="utf-8") as progress:
        while code is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_LOOK_SECONDS)
            told = _tell(method, settings, log, progress, told)
            began, finished = _told_steps(progress, method.steps(settings))
            if end_at == math.inf and finished:
                end_at = time.monotonic() + method.end_seconds
            if watch and code is None:
                watch.while_running(began, finished)
            if code is None and time.monotonic() > end_at:
                _end(process)
                code, ended = 0, f"was ended {method.end_seconds:g} s after its last step"
    if code and (found := _OUT_OF_MEMORY.search(_text(log))):
        write_error(trial_dir, rank, "oom", " ".join(found[0].split())[:_REASON_CHARACTERS])
    return code, ended


def _told_steps(progress: IO[str], steps: int) -> tuple[bool, bool]:
    """Whether some rank of this host has told a step in progress.jsonl, and whether one has told the last."""
    progress.seek(0)
    lines = progress.read()
    return bool(lines), f'"step": {steps}, ' in lines


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_KILL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tell(method: Upstream, settings: TrialSettings, log: Path, progress: IO[str], told: int) -> int:
    """Add the steps that were printed since the last call to progress.jsonl; returns how many have been told."""
    printed = method.parse(_text(log))
    seconds = seconds_of(printed, settings)
    for index in range(told, len(seconds)):
        line = {"step": index + 1, "of": method.steps(settings), "seconds": seconds[index]}
        if index < len(printed.loss):
            line["loss"] = printed.loss[index]
        progress.write(json.dumps(line) + "\n")
    progress.flush()
    return max(told, len(seconds))


def _text(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:  # started by hand, with another log
        return ""


def ran(
    place: InstallPlace, rendered: Rendered, trial_dir: Path, device: str = "", data: dict[str, object] | None = None
) -> StartedSystem:
    """What is started, without paths of this machine."""
    pinned, state = place.pinned, place.state()
    names = {str(trial_dir): "TRIAL_DIR", str(place.folder): "UPSTREAM", str(Path(__file__).parent): "BASELINES"}

    def portable(text: str) -> str:
        for path, name in names.items():
            text = text.replace(path, name)
        return text

    return StartedSystem(
        flavour=place.flavour,
        pin=pinned.digest,
        commit=pinned.checkout.commit if pinned.checkout else "",
        release=pinned.release,
        command=[portable(word) for word in rendered.command],
        environment={name: portable(value) for name, value in rendered.environment.items()},
        device=device,
        packages={"python": state.python, "torch": state.torch, "cuda": state.cuda or "none", **state.packages}
        if state
        else {},
        borrowed=state.borrowed if state else {},
        builds=state.builds if state else {},
        data=data or {},
    )


def _gpu(given: Mapping[str, str]) -> tuple[str, Callable[[], GpuReading] | None]:
    """The name of this rank's GPU, and what looks at it; `cpu` and None where it has none."""
    listed, _ = query_gpus()
    shown = visible_gpus(listed, given.get("CUDA_VISIBLE_DEVICES"))
    local = int(given.get("LOCAL_RANK", "0"))
    if local >= len(shown):
        return "cpu", None
    own = shown[local]
    # CUDA may number GPUs of several models otherwise than nvidia-smi does, and then nobody here knows which one it is.
    if len({gpu.name for gpu in listed}) > 1 and given.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return own.name, partial(GpuReading, digest="", state=GpuState())
    return own.name, partial(read_gpu_named, own.uuid)


def write_error(trial_dir: Path, rank: int, kind: str, reason: str) -> None:
    write_json(trial_dir / "errors" / f"rank{rank}.json", {"kind": kind, "reason": reason})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
