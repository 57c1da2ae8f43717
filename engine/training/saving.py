"""Checkpoints of a run: parameters and optimizer states, each rank writing its shards.

The format is torch.distributed.checkpoint's, which any number of ranks can read. It holds no random state and no data
position: the order of the data follows from seed and step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from engine.distributed import World
from engine.memory.resources import software
from engine.model import Decoder
from engine.settings import ModelShape, from_json
from engine.training.manifest import (
    Manifest,
    aside_path,
    checkpoints,
    damage,
    data_files,
    file_facts,
    keep_newest,
    publish,
    read_manifest,
    set_aside,
    sweep,
    write_manifest,
)
from engine.training.preflight import check_facts, no_checkpoint


class _Writer(dcp.FileSystemWriter):
    """Writes as torch does, and raises the system's error, such as a full disk.

    torch's archive writer catches the system's error, closes the archive, and raises an error about that instead
    ("unexpected pos 704 vs 598"). The first one is known only here: pickling for the other ranks loses it.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            raise _system_error(error) or error from error


class Checkpoints:
    """The checkpoints of one run, which all ranks save and restore together; their directory is seen by all hosts."""

    def __init__(
        self,
        directory: Path,
        world: World,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        *,
        facts: dict[str, Any],
        keep: int,
    ) -> None:
        """`facts` must be equal for a run to resume from a checkpoint; `keep` is how many checkpoints stay."""
        self._directory, self._world, self._facts, self._keep = directory, world, facts, keep
        self._model, self._optimizer = model, optimizer

    def save(self, step: int) -> None:
        """Write the state after `step` steps; it counts only once it is whole. Collective."""
        aside, first = aside_path(self._directory, step), self._world.rank == 0
        if first:
            self._directory.mkdir(parents=True, exist_ok=True)
            sweep(self._directory)
            aside.mkdir()
        self._world.barrier()
        state = {"model": get_model_state_dict(self._model), "optimizer": self._optimizer_state()["state"]}
        try:
            dcp.save(state, storage_writer=_Writer(aside, sync_files=True))
        except dcp.CheckpointException as error:  # on all ranks, even if only one could not write
            self._world.barrier()
            if first:
                sweep(self._directory)  # frees space on a full disk for the error report
            self._world.barrier()
            raise _failed(f"the state after step {step} cannot be saved", error) from error
        self._world.barrier()
        mine = data_files(aside)[self._world.rank :: self._world.size]
        parts = cast(list[dict[str, Any]], self._world.gather(file_facts(aside, mine)))
        if first:
            manifest = Manifest(
                step=step,
                facts=self._facts,
                model=asdict(self._model.shape),
                files={name: facts for part in parts for name, facts in part.items()},
                software=software(),
            )
            write_manifest(aside, manifest)
            publish(self._directory, step)
            keep_newest(self._directory, self._keep)
        self._world.barrier()

    def restore(self) -> tuple[int, list[str]]:
        """Load the newest whole checkpoint. Collective.

        Returns the steps done until then, and a sentence about each newer checkpoint that was skipped; those are
        renamed. Raises ValueError when none is left, or when it was made with other facts.
        """
        skipped: list[str] = []
        for path in checkpoints(self._directory):
            manifest, problem = self._inspect(path)
            if manifest is None:
                self._world.barrier()  # no rank still reads it
                kept = set_aside(path) if self._world.rank == 0 else path
                skipped.append(f"checkpoint {path.name} is skipped because {problem}; it is now {kept.name}")
                self._world.barrier()
                continue
            check_facts(path, manifest.facts, self._facts)
            self._load(path)
            return manifest.step, skipped
        found = "; ".join(skipped) if skipped else f"{self._directory.name}/ holds none"
        raise no_checkpoint(found)

    def _inspect(self, path: Path) -> tuple[Manifest | None, str]:
        """The manifest of a whole checkpoint, or None and the problem. Every rank reads some of the files."""
        try:
            manifest = read_manifest(path)
        except ValueError as error:
            return None, str(error)
        names = sorted(manifest.files)[self._world.rank :: self._world.size]
        found = cast(list[str], self._world.gather(damage(path, {name: manifest.files[name] for name in names})))
        problem = next(filter(None, found), "")
        return (None, problem) if problem else (manifest, "")

    def _load(self, path: Path) -> None:
        parameters, optimizer = get_model_state_dict(self._model), self._optimizer_state()
        try:
            dcp.load({"model": parameters, "optimizer": optimizer["state"]}, storage_reader=dcp.FileSystemReader(path))
        except dcp.CheckpointException as error:
            raise _failed(f"checkpoint {path.name} cannot be loaded", error) from error
        set_model_state_dict(self._model, parameters)
        set_optimizer_state_dict(self._model, self._optimizer, optimizer)

    def _optimizer_state(self) -> dict[str, Any]:
        """Moments by parameter name. The parameter groups hold settings, which are those of the run and not saved."""
        return cast(dict[str, Any], get_optimizer_state_dict(self._model, self._optimizer))


def whole_parameters(path: Path) -> tuple[ModelShape, Mapping[str, Tensor]]:
    """Shape and parameters of a checkpoint, each whole, in host memory; needs no process group.

    Raises ValueError when the checkpoint is not whole.
    """
    manifest = read_manifest(path)
    if problem := damage(path, manifest.files):
        raise ValueError(problem)
    shape = cast(ModelShape, from_json(ModelShape, manifest.model))
    with torch.device("meta"):
        sizes = {name: parameter.shape for name, parameter in Decoder(shape).named_parameters()}
    dtype = torch.float64 if manifest.facts["dtype"] == "fp64" else torch.float32
    parameters = {name: torch.empty(size, dtype=dtype) for name, size in sizes.items()}
    with warnings.catch_warnings():  # `no_dist` says that there is no process group
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp.load({"model": parameters}, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return shape, parameters


def _failed(sentence: str, error: dcp.CheckpointException) -> OSError:
    """torch's collection of the ranks' errors, which is no `Exception`, as one of the first rank that has one."""
    rank, (cause, _) = min(error.failures.items())
    reason = next(line for line in (*str(cause).splitlines(), type(cause).__name__) if line.strip())
    return OSError(f"{sentence}: on rank {rank}, {reason}")


def _system_error(error: BaseException) -> OSError | None:
    """The error of the operating system during whose handling this one arose; None when there is none."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return None if found is None else OSError(found.errno, found.strerror)
