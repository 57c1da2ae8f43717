"""`python -m baselines.drive TRIAL_DIR`: one rank of a compared system, started by the launcher as any rank is.

Reads TRIAL_DIR/trial.json, has the adapter render the system's command, and runs it: in the same process group, with
the same log, in the system's own environment. Rank 0 leaves upstream.json, which says what was started. Steps that the
program prints go to progress.jsonl. A program that ran out of memory leaves errors/rank<r>.json, so that its trial ends
as `oom`, as one of the engine does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from baselines.handicaps import NCCL_VARIABLES, with_own_nccl
from baselines.install.places import Place
from baselines.tokens import write_tokens
from baselines.upstream import LOGS, RAN_FILE, Ran, Rendered, Upstream, foreign_environment, seconds_of
from engine.atomic import write_atomic
from engine.measurement import PROGRESS_FILE, write_json
from engine.plain_json import read_json, to_json
from engine.settings import TrialSettings, from_json

_LOOK_SECONDS = 0.5  # between looks at what the program has printed
_KILL_SECONDS = 5.0  # between asking a program to end and ending it
_OUT_OF_MEMORY = re.compile(r"^.*(?:OutOfMemoryError|CUDA out of memory|CUDA error: out of memory).*$", re.MULTILINE)
_REASON_CHARACTERS = 200


def settings_of(trial_dir: Path) -> TrialSettings:
    """The settings in trial.json. Raises FileNotFoundError, and ValueError for what is not a trial."""
    data = read_json(trial_dir / "trial.json")
    found: TrialSettings = from_json(TrialSettings, data["settings"])
    return found


def main(words: Sequence[str]) -> int:
    """Run one rank; returns the program's exit code, and ends by the signal that ended it."""
    if len(words) != 1:
        print("usage: python -m baselines.drive TRIAL_DIR", file=sys.stderr)
        return 2
    trial_dir, rank = Path(words[0]), int(os.environ.get("RANK", "0"))
    settings = settings_of(trial_dir)
    method: Upstream = importlib.import_module(read_json(trial_dir / "trial.json")["method"]).METHOD
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
    if rank == 0:
        write_json(trial_dir / RAN_FILE, to_json(ran(place, rendered, trial_dir, _device(), data)))
    code, ended = _run(method, settings, rendered, given, trial_dir, rank)
    if ended and rank == 0:
        before = read_json(trial_dir / RAN_FILE)
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


def _run(
    method: Upstream, settings: TrialSettings, rendered: Rendered, given: Mapping[str, str], trial_dir: Path, rank: int
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
            if end_at == math.inf and _has_finished(progress, method.steps(settings)):
                end_at = time.monotonic() + method.end_seconds
            if code is None and time.monotonic() > end_at:
                _end(process)
                code, ended = 0, f"was ended {method.end_seconds:g} s after its last step"
    if code and (found := _OUT_OF_MEMORY.search(_text(log))):
        write_error(trial_dir, rank, "oom", " ".join(found[0].split())[:_REASON_CHARACTERS])
    return code, ended


def _has_finished(progress: IO[str], steps: int) -> bool:
    """Whether some rank of this host has told the last step in progress.jsonl."""
    progress.seek(0)
    return f'"step": {steps}, ' in progress.read()


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


def ran(place: Place, rendered: Rendered, trial_dir: Path, device: str = "", data: dict[str, Any] | None = None) -> Ran:
    """What is started, without paths of this machine."""
    pinned, state = place.pinned, place.state()
    names = {str(trial_dir): "TRIAL_DIR", str(place.folder): "UPSTREAM", str(Path(__file__).parent): "BASELINES"}

    def portable(text: str) -> str:
        for path, name in names.items():
            text = text.replace(path, name)
        return text

    return Ran(
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


def _device() -> str:
    """The GPU's name, cpu where there is none."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    names = done.stdout.splitlines()
    return names[0].strip() if done.returncode == 0 and names else "cpu"


def write_error(trial_dir: Path, rank: int, kind: str, reason: str) -> None:
    write_json(trial_dir / "errors" / f"rank{rank}.json", {"kind": kind, "reason": reason})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
