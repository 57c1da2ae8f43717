"""The record of a started cluster, from which any later program can read its status and end it.

A state directory (mode 0700) holds `cluster.json`, the token and the quarantine. `cluster.json` is written before the
first process is started and again after each step: after a crash at any point, `down` finds everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cluster.files import reader
from cluster.files.errors import UsageError
from cluster.files.filesystem import state_folder, try_lock
from cluster.inventory.allocation import slurm_run
from cluster.inventory.hosts import Host

SCHEMA = 1
STATE_FILE = "cluster.json"
LOCK_FILE = ".lock"
TOKEN_FILE = "token"  # noqa: S105 - a file's name


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process by number and start time (clock ticks since boot): the number alone is given out again."""

    pid: str
    started: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedNode:
    """One node of a cluster, recorded before it is started."""

    name: str
    host: Host  # how SSH reaches it
    address: str  # how the other nodes reach it, IPv4
    interface: str  # the interface with that address
    mark: str  # in the environment of every process of ours there
    directory: str  # of ours there; ended with the cluster
    python: str  # interpreter there, inside the container where there is one
    folder: str  # this project's checkout there
    begun: bool = True  # something was or may have been started there
    container: bool = False
    engine: str = "docker"  # of the container, where there is one
    container_id: str = ""
    session: int = 0  # 0: not known to have started
    processes: tuple[Process, ...] = ()
    ranks: int = 1  # of one trial that fit there
    description: str = ""  # JSON: output of the describing program

    @property
    def ran(self) -> bool:
        """Whether Ray's start was seen to succeed."""
        return self.session != 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterState:
    """One cluster. The first node is the head."""

    session: str  # unique, part of every mark
    inventory: str  # its name
    created_at: str  # ISO 8601, UTC
    created_by: str  # user@host, for people
    known_hosts: Path | None  # None: SSH's default
    head_port: int
    complete: bool  # False while it is being started, and for good when that was cut short
    versions: str  # equal on all nodes, for people
    nodes: tuple[StartedNode, ...]
    of_run: bool = False  # started by `burst run` for itself, which ends it
    ending: bool = False  # `down` ended the other nodes; these did not answer it
    head_name: str = ""  # of a cluster that is ending: its head may have been ended
    schema: int = SCHEMA

    @property
    def head(self) -> StartedNode:
        return self.nodes[0]

    @property
    def head_address(self) -> str:
        """Where Ray's head answers, address:port."""
        return f"{self.head.address}:{self.head_port}"

    @property
    def joined(self) -> tuple[StartedNode, ...]:
        """The nodes on which Ray was started. Others failed, and may still hold something that `down` ends."""
        return tuple(node for node in self.nodes if node.ran)

    def is_head(self, node: StartedNode) -> bool:
        """Whether this node is, or was, the head."""
        return node.name == (self.head_name or self.head.name)

    def with_node(self, node: StartedNode) -> ClusterState:
        """The same cluster with a new record of one node."""
        nodes = tuple(node if old.name == node.name else old for old in self.nodes)
        return dataclasses.replace(self, nodes=nodes)


def default_directory() -> Path:
    """The default folder for state; in a Slurm job one of its own, because many jobs share a home directory."""
    run = slurm_run()
    return state_folder("cluster") if run is None else state_folder("slurm") / run


class StateDirectory:
    """The files of one cluster on the launching machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.token_path = path / TOKEN_FILE

    @contextlib.contextmanager
    def held(self, purpose: str) -> Iterator[None]:
        """Keep other programs from starting or ending the cluster meanwhile. Raises UsageError when one does so now.

        The kernel releases the lock when this program ends, also by a crash.
        """
        path = self.path / LOCK_FILE
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}); give --state a folder of yours") from error
        try:
            locked = try_lock(lock)
            if locked is None:
                raise UsageError(f"{path} is on a file system without locks; give --state a folder on another one")
            if not locked:
                raise UsageError(
                    f"cannot {purpose}: another program starts or ends one in {self.path} right now; wait for it"
                )
            yield
        finally:
            os.close(lock)

    def load(self) -> ClusterState | None:
        """The cluster that is up, or half up; None when there is none. Raises UsageError for a file that is not one."""
        path = self.path / STATE_FILE
        if not path.exists():
            return None
        state = reader.load(ClusterState, path, "cluster state")
        if state.schema != SCHEMA:
            raise UsageError(
                f"{path} has schema {state.schema}, expected {SCHEMA}; end that cluster with its own burst"
            )
        return state

    def save(self, state: ClusterState) -> None:
        """Leave the state, whole or not at all, readable by its owner alone."""
        write_private(self.path / STATE_FILE, json.dumps(dataclasses.asdict(state), indent=1, default=_plain) + "\n")

    def save_token(self, token: str) -> None:
        """The cluster's password; only ever in files of mode 0600 and on the standard input of our own program."""
        write_private(self.token_path, token)

    def token(self) -> str:
        try:
            return self.token_path.read_text(encoding="ascii")
        except OSError as error:
            raise UsageError(
                f"{self.token_path} cannot be read ({error.strerror}); end the cluster and start it again"
            ) from error

    def keep_log(self, node: str, text: str) -> Path:
        """Keep what a node printed when Ray did not start there, in place of an earlier log; returns the file."""
        path = self.path / "logs" / f"ray-start-{quote(node, safe='')}.log"
        write_private(path, text)
        return path

    def clear(self) -> None:
        """Forget the cluster: after nothing of it is left. The quarantine outlives it."""
        self.token_path.unlink(missing_ok=True)
        (self.path / STATE_FILE).unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Write beside `path` with mode 0600, then rename. Raises UsageError where the folder cannot be used."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); give --state a folder of yours") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def _plain(value: Any) -> str:
    assert isinstance(value, Path), value
    return str(value)
