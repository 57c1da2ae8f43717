"""Checkpoints and metrics of a run brought to the launching machine, from hosts that do not see its storage.

Ranks leave each checkpoint whole on two hosts (`engine.training.state`); here it is fetched as soon as it is there,
so that a run resumes on any hosts.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.atomic import flush_to_disk, write_atomic
from engine.training.files import METRICS_FILE, checkpoints_directory
from engine.training.manifest import (
    MANIFEST_FILE,
    aside_path,
    checkpoint_path,
    checkpoints,
    keep_newest,
    publish,
    read_manifest,
    read_whole,
    set_aside,
    step_of,
    sweep,
)
from engine.training.trackers import tensorboard_directory
from harness.launch.launcher import Folder
from harness.launch.ray.host import FETCH_BYTES
from harness.launch.ray.watch import PIECE_BYTES, HostLost

_RUN_ID_FILE = ".run-id"  # in the run directory and in the hosts' folders: runs in other directories have its name too
_FINISHED = re.compile(rf"{checkpoints_directory(Path())}/step-(\d{{8,}})/{re.escape(MANIFEST_FILE)}")


class Gathering:
    """See `harness.launch.launcher.Exchange`. `root` is the run directory here; `keep` checkpoints stay in it."""

    def __init__(self, root: Path, *, keep: int, say: Callable[[str], None]) -> None:
        self.root = root
        self._keep, self._say = keep, say
        self._directory = checkpoints_directory(root)
        self._fetching: threading.Thread | None = None
        self._problem: OSError | None = None  # of the thread

    def begin(self, folders: Sequence[Folder], *, all_apart: bool) -> None:
        """Send the newest whole checkpoint to one host, where none has it; the ranks copy it to the others.

        Before that, fetch what an earlier start of this run has left there: this program may have been killed.
        """
        apart = ", ".join(folder.host for folder in folders)
        self._say(f"{self.root} is not seen by {apart}: its checkpoints are gathered here as they are saved")
        run_id = self._run_id()
        newest = self._newest_whole()
        newest = self._fetch_left([folder for folder in folders if self._is_of(run_id, folder)]) or newest
        for folder in folders:
            folder.remove()
            folder.write(_RUN_ID_FILE, [run_id])
            if folder.first and (self.root / METRICS_FILE).is_file():
                self._send(folder, METRICS_FILE)
        if all_apart and newest is not None:
            names = [MANIFEST_FILE, *read_manifest(newest).files]
            for name in names:
                self._send(folders[0], str((newest / name).relative_to(self.root)))

    def progressed(self, line: dict[str, object], folders: Sequence[Folder]) -> None:
        """Fetch a checkpoint that was saved, beside the job: while one is fetched, a later one waits for the next."""
        if self._problem is not None:
            raise self._problem
        if "saved" in line and (self._fetching is None or not self._fetching.is_alive()):
            self._fetching = threading.Thread(target=self._fetch_beside, args=(list(folders),), daemon=True)
            self._fetching.start()

    def end(self, folders: Sequence[Folder]) -> None:
        """Fetch what is newer than what is here."""
        if self._fetching is not None:
            self._fetching.join()
        if self._problem is not None:
            raise self._problem
        self._fetch(folders)
        for folder in folders:
            with contextlib.suppress(HostLost):
                folder.remove()

    def _run_id(self) -> bytes:
        path = self.root / _RUN_ID_FILE
        if not path.exists():
            write_atomic(path, secrets.token_hex(16))
        return path.read_bytes()

    def _is_of(self, run_id: bytes, folder: Folder) -> bool:
        """Whether the folder holds files of this run."""
        try:
            return b"".join(folder.read(_RUN_ID_FILE)) == run_id
        except FileNotFoundError:
            return False

    def _fetch_left(self, folders: Sequence[Folder]) -> Path | None:
        """Fetch what earlier starts have left in any folder and is newer than what is here; returns the checkpoint."""
        found = [(folder, folder.files()) for folder in folders]
        if (newest := self._fetch_newest(found)) is None:
            return None
        self._say(f"checkpoint {newest.name} was still on the hosts, from a start that ended before it was fetched")
        with_metrics = [(files[METRICS_FILE], folder, files) for folder, files in found if METRICS_FILE in files]
        if with_metrics:  # that of the host on which rank 0 was
            _, folder, files = max(with_metrics, key=lambda one: one[0])
            self._fetch_metrics(folder, files)
        return newest

    def _fetch_beside(self, folders: Sequence[Folder]) -> None:
        try:
            self._fetch(folders)
        except OSError as error:
            self._problem = error

    def _fetch(self, folders: Sequence[Folder]) -> None:
        """Raises OSError when this machine cannot write what was fetched."""
        found: list[tuple[Folder, dict[str, int]]] = []
        for folder in folders:
            with contextlib.suppress(HostLost):
                files = folder.files()
                found.append((folder, files))
                if folder.first:
                    self._fetch_metrics(folder, files)
        self._fetch_newest(found)

    def _fetch_newest(self, found: Sequence[tuple[Folder, dict[str, int]]]) -> Path | None:
        """Fetch the newest checkpoint of all folders, given with their files, and return its place here; None where
        that of this machine is as new."""
        held = [
            (int(match[1]), folder) for folder, files in found for name in files if (match := _FINISHED.fullmatch(name))
        ]
        here = max((step_of(path) for path in checkpoints(self._directory)), default=-1)
        for step, folder in sorted(held, key=lambda one: -one[0]):
            if step <= here:
                return None
            with contextlib.suppress(HostLost, FileNotFoundError, ValueError):  # the next host has it, or a newer one
                self._fetch_checkpoint(folder, step)
                return checkpoint_path(self._directory, step)
        return None

    def _fetch_checkpoint(self, folder: Folder, step: int) -> None:
        """Raises ValueError when what arrived is not what the ranks wrote."""
        there, aside = checkpoint_path(checkpoints_directory(Path()), step), aside_path(self._directory, step)
        self._directory.mkdir(parents=True, exist_ok=True)
        sweep(self._directory)
        self._receive(folder, str(there / MANIFEST_FILE), aside / MANIFEST_FILE)
        manifest = read_manifest(aside)
        for name in manifest.files:
            if Path(name).name != name:
                raise ValueError(f"{name} would lead out of the checkpoint")
            self._receive(folder, str(there / name), aside / name)
        read_whole(aside)
        publish(self._directory, step)
        keep_newest(self._directory, self._keep)

    def _fetch_metrics(self, folder: Folder, files: dict[str, int]) -> None:
        """metrics.jsonl and event files, written aside first; none that would lead out of the run directory."""
        events = str(tensorboard_directory(Path()))
        for name, size in files.items():
            wanted = name == METRICS_FILE or Path(name).parent == Path(events)
            if wanted and size <= FETCH_BYTES:
                target = self.root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                aside = target.with_name(f".{target.name}.part")
                with contextlib.suppress(FileNotFoundError):
                    self._receive(folder, name, aside)
                    aside.rename(target)

    def _newest_whole(self) -> Path | None:
        """The newest checkpoint here whose files are as they were written; damaged ones before it are renamed."""
        for path in checkpoints(self._directory):
            try:
                read_whole(path)
                return path
            except ValueError as error:
                kept = set_aside(path)
                self._say(f"checkpoint {path.name} is skipped because {error}; it is now {kept.name}")
        return None

    def _send(self, folder: Folder, name: str) -> None:
        with open(self.root / name, "rb") as file:
            folder.write(name, iter(lambda: file.read(PIECE_BYTES), b""))

    def _receive(self, folder: Folder, name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as file:
            for piece in folder.read(name):
                file.write(piece)
        flush_to_disk(target)
