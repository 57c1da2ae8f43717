"""Checkpoints of a run: parameters and optimizer states, each rank writing its shards.

The format is torch.distributed.checkpoint's, which any number of ranks can read. It holds no random state and no data
position: the order of the data follows from seed and step.

On one host, and on shared storage, all ranks see one directory and nothing is copied. Otherwise each host has a
directory of its own at the path that it was given, and files are copied between these: torch.distributed.checkpoint
reads all files from one place.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from engine.atomic import flush_to_disk
from engine.distributed import World
from engine.lora import Lora, adapter_sizes
from engine.memory.resources import software
from engine.models.decoder import Decoder
from engine.settings import from_json
from engine.shape import ModelShape
from engine.training.manifest import (
    FileFacts,
    Manifest,
    aside_path,
    broken_path,
    checkpoint_path,
    checkpoints,
    damage,
    data_files,
    file_facts,
    keep_newest,
    publish,
    read_manifest,
    read_whole,
    set_aside,
    step_of,
    sweep,
    write_manifest,
)
from engine.training.preflight import check_facts, no_checkpoint

PIECE_BYTES = 16 * 2**20  # of a file in memory while it is copied
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
KEEPERS = 2  # directories that keep a whole checkpoint each, so that the loss of one host loses none


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFolders:
    """The directories of all ranks. A directory is named by its leader, the first rank that sees it."""

    rank: int
    leaders: tuple[int, ...]  # by rank: the leader of its directory

    @property
    def shared(self) -> bool:
        """Whether all ranks see one directory."""
        return len(set(self.leaders)) == 1

    @property
    def leader(self) -> int:
        """Of this rank's directory."""
        return self.leaders[self.rank]

    @property
    def leads(self) -> bool:
        """Whether this rank makes, renames and removes what is in its directory."""
        return self.leader == self.rank

    @property
    def keepers(self) -> tuple[int, ...]:
        """Leaders of the directories that keep whole checkpoints."""
        return tuple(sorted(set(self.leaders))[:KEEPERS])

    @property
    def keeps(self) -> bool:
        """Whether this rank's directory keeps whole checkpoints."""
        return self.leader in self.keepers

    def share(self, names: Sequence[str]) -> Sequence[str]:
        """The files of this rank's directory that this rank reads: each is read by one of its ranks."""
        mine = [rank for rank, leader in enumerate(self.leaders) if leader == self.leader]
        return names[mine.index(self.rank) :: len(mine)]


def find_storage(directory: Path, world: World) -> CheckpointFolders:
    """Find out by small files which ranks see the same `directory`; it is made where it is missing. Collective."""
    directory.mkdir(parents=True, exist_ok=True)
    own = f".seen-{secrets.token_hex(8)}" if os.environ.get("LOCAL_RANK", "0") == "0" else ""
    if own:
        (directory / own).touch()
    marks = world.gather(own)
    # Each by its name: a list of the directory may be an old one on a network file system.
    leader = next((rank for rank, mark in enumerate(marks) if mark and (directory / mark).exists()), world.rank)
    leaders = world.gather(leader)
    if own:
        (directory / own).unlink()
    return CheckpointFolders(rank=world.rank, leaders=tuple(leaders))


class CheckpointCopier:
    """Copies files of a checkpoint from the ranks that have them to other directories."""

    def __init__(self, storage: CheckpointFolders, world: World) -> None:
        """Collective."""
        self._storage, self._world = storage, world
        # Files are in host memory, which NCCL does not send; on CPUs too they must not queue between collectives.
        self._group = dist.new_group(backend="gloo", group_desc="files")

    def deliver(
        self, source: Path, target: Path, parts: Sequence[Mapping[str, FileFacts]], receivers: Sequence[int]
    ) -> None:
        """Copy files from `source` to the `target` of each receiver, a leader, unless its directory has them already.

        `parts` are the files that each rank sends, by rank. Collective. Raises OSError on every rank when one of them
        could not read or write, or when content arrives changed.
        """
        problem = ""  # the first of this rank
        for receiver in receivers:
            for sender, files in enumerate(parts):
                if self._storage.leaders[sender] == receiver or self._world.rank not in (sender, receiver):
                    continue
                for name, facts in files.items():
                    if self._world.rank == sender:
                        found = self._copy(source / name, facts.bytes, receiver, sends=True)
                    else:
                        found = self._copy(target / name, facts.bytes, sender, sends=False)
                        found = found or damage(target, {name: facts})
                    problem = problem or found
        answers = self._world.gather(problem)
        if found := next(filter(None, answers), ""):
            raise OSError(found)

    def _copy(self, path: Path, size: int, peer: int, *, sends: bool) -> str:
        """Send a file to a peer, or receive one; returns the problem, if there was one. All of its bytes are sent and
        taken in any case, because the peer counts on them."""
        piece, moved, problem = torch.zeros(PIECE_BYTES, dtype=torch.uint8), 0, ""
        move = dist.send if sends else dist.recv
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "rb" if sends else "wb") as file:
                while moved < size:
                    part = piece[: size - moved]
                    if sends:
                        file.readinto(part.numpy())  # type: ignore[attr-defined]
                    move(part, peer, group=self._group)
                    moved += len(part)
                    if not sends:
                        file.write(part.numpy())
            if not sends:
                flush_to_disk(path)
        except OSError as error:
            problem = f"{path.name} cannot be {'read' if sends else 'written'} ({error.strerror})"
        while moved < size:
            part = piece[: size - moved]
            move(part, peer, group=self._group)
            moved += len(part)
        return problem


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
    """The checkpoints of one run, which all ranks save and restore together.

    Where hosts have run directories of their own, the first KEEPERS of them keep each checkpoint whole.
    """

    def __init__(
        self,
        directory: Path,
        world: World,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        *,
        facts: dict[str, object],
        keep: int,
        lora: Lora | None = None,
    ) -> None:
        """`facts` must be equal for a run to resume from a checkpoint; `keep` is how many checkpoints stay. With `lora`
        they hold adapters alone: what is frozen is in the folder that it came from.

        Collective.
        """
        self._directory, self._world, self._facts, self._keep = directory, world, facts, keep
        self._model, self._optimizer, self._lora = model, optimizer, lora
        self.storage = find_storage(directory, world)
        self._courier = None if self.storage.shared else CheckpointCopier(self.storage, world)

    def save(self, step: int) -> None:
        """Write the state after `step` steps; it counts only once it is whole. Collective."""
        aside = aside_path(self._directory, step)
        if self.storage.leads:
            self._directory.mkdir(parents=True, exist_ok=True)
            sweep(self._directory)
            aside.mkdir()
        self._world.barrier()
        state = {"model": self._parameters(), "optimizer": self._optimizer_state()["state"]}
        try:
            dcp.save(state, storage_writer=_Writer(aside, sync_files=True))
        except dcp.CheckpointException as error:  # on all ranks, even if only one could not write
            self._sweep()  # frees space on a full disk for the error report
            raise _failed(f"the state after step {step} cannot be saved", error) from error
        self._world.barrier()
        mine = file_facts(aside, self.storage.share(data_files(aside)))
        parts = self._world.gather(mine)  # by the rank that has read them
        if self._courier is not None:
            try:
                self._courier.deliver(aside, aside, parts, self.storage.keepers)
            except OSError as error:
                self._sweep()
                raise OSError(f"the state after step {step} cannot be gathered: {error}") from error
        if self.storage.leads and self.storage.keeps:
            manifest = Manifest(
                step=step,
                facts=self._facts,
                model=asdict(self._model.shape),
                lora=self._lora,
                files={name: facts for part in parts for name, facts in part.items()},
                software=software(),
            )
            write_manifest(aside, manifest)
            publish(self._directory, step)
            keep_newest(self._directory, self._keep)
        elif self.storage.leads:
            sweep(self._directory)  # the keepers have what was written here
        self._world.barrier()

    def restore(self) -> tuple[int, list[str]]:
        """Load the newest whole checkpoint of all directories. Collective.

        Returns the steps done until then, and a sentence about each newer checkpoint that was skipped; those are
        renamed. Raises ValueError when none is left, or when it was made with other facts.
        """
        skipped: list[str] = []
        steps = [step_of(path) for path in checkpoints(self._directory)] if self.storage.leads else []
        held = self._world.gather(steps)  # by leader
        for step in sorted({step for steps in held for step in steps}, reverse=True):
            path = checkpoint_path(self._directory, step)
            for leader in (rank for rank, steps in enumerate(held) if step in steps):
                found = self._inspect(path, leader)
                if isinstance(found, str):
                    kept = set_aside(path) if self._world.rank == leader else broken_path(path)
                    skipped.append(f"checkpoint {path.name} is skipped because {found}; it is now {kept.name}")
                    self._world.barrier()
                    continue
                manifest, parts = found
                check_facts(path, manifest.facts, self._facts)
                self._load(path, manifest, parts, leader)
                return manifest.step, skipped
        found_none = "; ".join(skipped) if skipped else f"{self._directory.name}/ holds none"
        raise no_checkpoint(found_none)

    def _inspect(self, path: Path, leader: int) -> tuple[Manifest, list[dict[str, FileFacts]]] | str:
        """The manifest of a whole checkpoint in `leader`'s directory, and which rank has read which of its files; or
        its problem. Every rank that sees it reads some of the files."""
        manifest, problem, mine = None, "", dict[str, FileFacts]()
        if self.storage.leader == leader:
            try:
                manifest = read_manifest(path)
                mine = {name: manifest.files[name] for name in self.storage.share(sorted(manifest.files))}
                problem = damage(path, mine)
            except ValueError as error:
                problem = str(error)
        found = problem, manifest if self._world.rank == leader else None, mine
        # When all have answered, no rank still reads it.
        answers = self._world.gather(found)
        if problem := next((problem for problem, _, _ in answers if problem), ""):
            return problem
        manifest = answers[leader][1]
        assert manifest is not None, path
        return manifest, [files for _, _, files in answers]

    def _load(self, path: Path, manifest: Manifest, parts: list[dict[str, FileFacts]], leader: int) -> None:
        """Load a checkpoint of `leader`'s directory, copied before to the directories that are apart from it."""
        there = aside_path(self._directory, manifest.step)
        if self._courier is not None:
            self._sweep()
            others = [rank for rank in sorted(set(self.storage.leaders)) if rank != leader]
            try:
                self._courier.deliver(path, there, parts, others)
            except OSError as error:
                self._sweep()
                raise OSError(f"checkpoint {path.name} cannot be copied to all hosts: {error}") from error
        source = path if self.storage.leader == leader else there
        parameters, optimizer = self._parameters(), self._optimizer_state()
        try:
            dcp.load(
                {"model": parameters, "optimizer": optimizer["state"]}, storage_reader=dcp.FileSystemReader(source)
            )
        except dcp.CheckpointException as error:
            raise _failed(f"checkpoint {path.name} cannot be loaded", error) from error
        set_model_state_dict(self._model, parameters, options=_TRAINED)
        set_optimizer_state_dict(self._model, self._optimizer, optimizer)
        self._world.barrier()  # no rank still reads it
        if source == there and self.storage.leads:
            if self.storage.keeps:  # so that the loss of another host leaves one
                write_manifest(there, manifest)
                publish(self._directory, manifest.step)
            else:
                sweep(self._directory)
        self._world.barrier()

    def _sweep(self) -> None:
        """Remove what is half written in every directory. Collective."""
        self._world.barrier()
        if self.storage.leads:
            sweep(self._directory)
        self._world.barrier()

    def _parameters(self) -> dict[str, Any]:
        """All but frozen ones, by name."""
        return cast(dict[str, Any], get_model_state_dict(self._model, options=_TRAINED))

    def _optimizer_state(self) -> dict[str, Any]:
        """Moments by parameter name. The parameter groups hold settings, which are those of the run and not saved."""
        return cast(dict[str, Any], get_optimizer_state_dict(self._model, self._optimizer))


def whole_parameters(path: Path) -> tuple[ModelShape, Mapping[str, Tensor]]:
    """Shape and parameters of a checkpoint, or its adapters, each whole, in host memory; needs no process group.

    Raises ValueError when the checkpoint is not whole, or is removed meanwhile.
    """
    manifest = read_whole(path)
    shape = from_json(ModelShape, manifest.model)
    sizes = shape.parameter_sizes() if manifest.lora is None else adapter_sizes(shape, manifest.lora)
    dtype = torch.float64 if manifest.facts["dtype"] == "fp64" else torch.float32
    parameters = {name: torch.empty(size, dtype=dtype) for name, size in sizes.items()}
    with warnings.catch_warnings():  # `no_dist` says that there is no process group
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            dcp.load({"model": parameters}, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        except dcp.CheckpointException as error:
            raise ValueError(str(_failed("its tensors cannot be read", error))) from error
        except OSError as error:
            raise ValueError(f"its tensors cannot be read ({error.strerror})") from error
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
