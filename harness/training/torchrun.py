"""`burst train --torchrun`: each host's own directory of the run, and what a host says that has lost the first one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.training.files import RUN_FILE, checkpoints_directory
from engine.training.manifest import checkpoints
from harness.base.errors import UsageError
from harness.launch.launcher import Folder
from harness.launch.torchrun import Place, TorchrunLauncher, place_of, torchrun_launcher
from harness.machine.this_machine import Machine, discover
from harness.records.provenance import commit
from harness.run.directory import opened_for_writing
from harness.training.file import TrainingFile
from harness.training.planning import settings_that_fit
from harness.training.progress import next_step
from harness.training.run import Start


class OwnDirectories:
    """See `harness.launch.launcher.Exchange`: nothing is gathered, because every host has a directory of the run, and
    the ranks leave each checkpoint whole in two of them (`engine.training.state`)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self, folders: Sequence[Folder], *, all_apart: bool) -> None:
        for folder in folders:
            folder.write(RUN_FILE, [(self.root / RUN_FILE).read_bytes()])

    def progressed(self, line: dict[str, object], folders: Sequence[Folder]) -> None: ...

    def end(self, folders: Sequence[Folder]) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunStart:
    """One start of a run by torchrun. `again` is the command line of burst."""

    file: TrainingFile
    place: Place
    run_dir: Path
    resume: bool
    again: Sequence[str]

    def launcher(self) -> TorchrunLauncher:
        """On the first host; on the others this ends the program with the run. Raises UsageError."""
        ranks, wanted = self.place.ranks, self.file.config.settings.world_size
        if wanted != ranks:
            raise UsageError(
                f"{self.file.path} has world_size {wanted}, but torchrun started {ranks} ranks; "
                f"start as many, or give --set world_size={ranks} with a cp_size that divides it"
            )
        return torchrun_launcher(self.place, self.run_dir, self._opened, self._lost_first)

    def _opened(self) -> contextlib.AbstractContextManager[object]:
        """The directory of this host; one that is new may resume from another's checkpoint."""
        resume = self.resume and (self.run_dir / RUN_FILE).is_file()
        return opened_for_writing(self.run_dir, resume=resume, marker=RUN_FILE)

    def _lost_first(self, hosts: Sequence[tuple[str, str]], why: str) -> str:
        """`hosts`: address and name of each."""
        machine = replace(discover(), nodes=self.place.nodes - 1, ranks_per_node=self.place.local_ranks)
        changes = settings_that_fit(self.file.config, machine) or {}
        number, second = self.place.node - 1, hosts[1]
        if number < self._nodes(changes, machine):
            following = next_step(self.run_dir, self.line(changes, machine, number, second[0]), changes)
        else:
            following = f"the run goes on without this host, by the command that {second[1]} prints"
        return f"{hosts[0][1]} was lost ({why}); {following}"

    def _nodes(self, changes: Mapping[str, int], machine: Machine) -> int:
        return machine.nodes_for(changes.get("world_size", self.place.ranks)) or machine.nodes

    def line(self, changes: Mapping[str, int], machine: Machine, node: int = 0, master: str = "") -> list[str]:
        """What starts the first hosts of `machine` again: the line of its `node`-th one."""
        nodes = self._nodes(changes, machine)
        ranks = changes.get("world_size", self.place.ranks) // nodes
        return [
            *("torchrun", "--nnodes", str(nodes), "--nproc-per-node", str(ranks), "--node-rank", str(node)),
            *("--master-addr", master or self.place.master, "--master-port", str(self.place.port)),
            *("-m", "harness", *self.again[1:]),
        ]


def started_by_torchrun(file: TrainingFile, run_dir: Path, *, resume: bool, again: Sequence[str]) -> Start:
    """The start of a run, on the first host; on the others this ends the program with the run. One that torchrun
    repeats after a failure resumes. Raises UsageError."""
    repeated = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    resume |= repeated and bool(checkpoints(checkpoints_directory(run_dir)))
    place = place_of(os.environ)
    began = TorchrunStart(file=file, place=place, run_dir=run_dir, resume=resume, again=again)
    launcher = began.launcher()
    return Start(
        machine=launcher.machine,
        launcher=launcher,
        run_dir=run_dir,
        resume=resume,
        commit=commit(),
        again=began.line({}, launcher.machine),
        exchange=OwnDirectories(run_dir.absolute()) if place.nodes > 1 else None,
        resized=began.line,
    )
