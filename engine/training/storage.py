"""Which ranks see the same run directory, and copies of files between directories that are apart.

On one host, and on shared storage, all ranks see one directory and nothing is copied. Otherwise each host has a
directory of its own at the path that it was given.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from engine.atomic import flush_to_disk
from engine.distributed import World
from engine.training.manifest import FileFacts

PIECE_BYTES = 16 * 2**20  # of a file in memory while it is copied
KEEPERS = 2  # directories that keep a whole checkpoint each, so that the loss of one host loses none

_Parts = Sequence[Mapping[str, FileFacts]]  # by rank: the files that it sends


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
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


def find_storage(directory: Path, world: World) -> Storage:
    """Find out by small files which ranks see the same `directory`; it is made where it is missing. Collective."""
    directory.mkdir(parents=True, exist_ok=True)
    own = f".seen-{secrets.token_hex(8)}" if os.environ.get("LOCAL_RANK", "0") == "0" else ""
    if own:
        (directory / own).touch()
    marks = cast(list[str], world.gather(own))
    # Each by its name: a list of the directory may be an old one on a network file system.
    leader = next((rank for rank, mark in enumerate(marks) if mark and (directory / mark).exists()), world.rank)
    leaders = cast(list[int], world.gather(leader))
    if own:
        (directory / own).unlink()
    return Storage(rank=world.rank, leaders=tuple(leaders))


class Courier:
    """Copies files of a checkpoint from the ranks that have them to other directories."""

    def __init__(self, storage: Storage, world: World) -> None:
        """Collective."""
        self._storage, self._world = storage, world
        # Files are in host memory, which NCCL does not send; on CPUs too they must not queue between collectives.
        self._group = dist.new_group(backend="gloo", group_desc="files")

    def deliver(self, source: Path, target: Path, parts: _Parts, receivers: Sequence[int]) -> None:
        """Copy files from `source` to the `target` of each receiver, a leader, unless its directory has them already.

        Collective. Raises OSError on every rank when one of them could not read or write, or when content arrives
        changed.
        """
        problems: list[str] = []  # of this rank; after one it still takes and gives the bytes that its peers count on
        for receiver in receivers:
            for sender, files in enumerate(parts):
                if self._storage.leaders[sender] == receiver:
                    continue
                for name, facts in files.items():
                    if self._world.rank == sender:
                        problems.append(self._send(source / name, int(facts["bytes"]), receiver))
                    elif self._world.rank == receiver:
                        problems.append(self._receive(target / name, facts, sender))
        answers = cast(list[str], self._world.gather(next(filter(None, problems), "")))
        if found := next(filter(None, answers), ""):
            raise OSError(found)

    def _send(self, path: Path, size: int, receiver: int) -> str:
        """Send a file; returns the problem, if there was one. The receiver gets as many bytes all the same."""
        problem = ""
        piece = torch.zeros(PIECE_BYTES, dtype=torch.uint8)
        try:
            file = open(path, "rb")  # noqa: SIM115 - closed below, after the bytes that the receiver waits for
        except OSError as error:
            file, problem = None, f"{path.name} cannot be read ({error.strerror})"
        for first in range(0, size, PIECE_BYTES):
            part = piece[: min(PIECE_BYTES, size - first)]
            if file is not None and not problem:
                try:
                    file.readinto(part.numpy())
                except OSError as error:
                    problem = f"{path.name} cannot be read ({error.strerror})"
            dist.send(part, receiver, group=self._group)
        if file is not None:
            file.close()
        return problem

    def _receive(self, path: Path, facts: FileFacts, sender: int) -> str:
        """Receive a file; returns the problem, if there was one. All its bytes are taken all the same."""
        problem, digest = "", hashlib.sha256()
        piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        file = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "wb")  # noqa: SIM115 - closed below, when all bytes have been taken
        except OSError as error:
            problem = f"{path.name} cannot be written ({error.strerror})"
        size = int(facts["bytes"])
        for first in range(0, size, PIECE_BYTES):
            part = piece[: min(PIECE_BYTES, size - first)]
            dist.recv(part, sender, group=self._group)
            digest.update(part.numpy())
            if file is not None and not problem:
                try:
                    file.write(part.numpy())
                except OSError as error:
                    problem = f"{path.name} cannot be written ({error.strerror})"
        if file is not None:
            try:
                file.close()
                flush_to_disk(path)
            except OSError as error:
                problem = problem or f"{path.name} cannot be written ({error.strerror})"
        if not problem and digest.hexdigest() != facts["sha256"]:
            problem = f"{path.name} arrived from rank {sender} changed"
        return problem
