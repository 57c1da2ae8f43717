"""A compared system of the tests: installed in the folder that SOME_SYSTEMS names, and no copy of any real one."""

from __future__ import annotations

import os
from pathlib import Path

from baselines.called import UpstreamAttention
from baselines.install.places import InstallPlace
from baselines.upstream import Rendered
from engine.settings import TrialSettings

# One rank's program: what it says is what it was started with, and its seed decides how it ends.
PROGRAM = """
import json, os, pathlib, signal, sys, time
seed, steps, rank = int(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])
print("rank", rank, "of", os.environ["WORLD_SIZE"], "PYTHONPATH", os.environ.get("PYTHONPATH"), flush=True)
print("waits at", os.environ["MASTER_ADDR"], bool(int(os.environ["MASTER_PORT"])), os.environ["OWN"], flush=True)
held = b"x" * (800_000_000 if rank == 1 else 1)
all_hold = pathlib.Path("all_hold")  # else rank 0 may end all before rank 1 has its memory
if rank == 1:
    all_hold.touch()
while not all_hold.exists() and os.environ["WORLD_SIZE"] != "1":
    time.sleep(0.01)
for step in range(steps if seed != 3 else 1):
    if rank == 0:
        print("UPSTREAM " + json.dumps({"step": step + 1, "seconds": 0.5 + step, "forward_seconds": 0.25}), flush=True)
if seed == 1 and rank == 1:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB")
if seed == 2 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if seed == 4 and rank == 1:
    sys.exit("RuntimeError: as planned")
if seed == 5:
    signal.pause()
"""
WELL, OUT_OF_MEMORY, KILLED, FEW_STEPS, RAISES, STAYS = range(6)  # seeds


class SomeSystem(UpstreamAttention):
    """Attention by name alone: the program prints steps."""

    name = "some_upstream"
    package = "some"
    system = "Some"
    source = "the tests"
    end_seconds = 1.0

    @property
    def places(self) -> list[InstallPlace]:
        return [InstallPlace(system=self.package, flavour="current", base=Path(os.environ["SOME_SYSTEMS"]))]

    def render(self, settings: TrialSettings, trial_dir: Path, place: InstallPlace) -> Rendered:
        return Rendered(
            command=(
                str(place.python),
                "-u",
                str(trial_dir / "some.py"),
                str(settings.seed),
                str(self.steps(settings)),
            ),
            environment={"OWN": "set"},
            files={"some.py": PROGRAM},
        )


METHOD = SomeSystem()
