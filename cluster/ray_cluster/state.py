"""The record of a started cluster, from which any later program can read its status and end it.

A state directory (mode 0700) holds `cluster.json` and the token. A node stands in `cluster.json` before the first
process is started on it: after a crash at any point, the next `up` or `down` finds everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cluster.files import reader
from cluster.files.errors import UsageError
from cluster.files.filesystem import state_folder, try_lock, write_whole
from cluster.inventory.hosts import Host

SCHEMA = 2
STATE_FILE = "cluster.json"
LOCK_FILE = ".lock"
TOKEN_FILE = "token"  # noqa: S105 - a file's name


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedNode:
    """One node of a cluster, recorded before anything is started on it."""

    name: str
    host: Host  # how SSH reaches it
    address: str  # how the other nodes reach it, IPv4; empty until it is known
    mark: str  # in the environment of every process of ours there
    directory: str  # of ours there; removed with the cluster
    python: str  # interpreter there, inside the container where there is one
    folder: str  # this project's checkout there
    engine: str = ""  # docker or podman; empty without a container
    container_id: str = ""
    silent: bool = False  # it is part of a cluster that is up, and did not answer the last `up`


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterState:
    """One cluster. The first node is the head; without nodes it is ended, and `left` alone remains."""

    session: str  # unique
    inventory: str  # its file, or its name
    created_at: str  # ISO 8601, UTC
    created_by: str  # user@host, for people
    known_hosts: Path | None  # None: SSH's default
    head_port: int
    nodes: tuple[StartedNode, ...]
    left: tuple[StartedNode, ...] = ()  # not reached when they were to be ended; `up` and `down` try again
    of_run: bool = False  # started by `burst run` for itself, which ends it
    schema: int = SCHEMA

    @property
    def head(self) -> StartedNode:
        return self.nodes[0]

    @property
    def head_address(self) -> str:
        """Where Ray's head answers, address:port."""
        return f"{self.head.address}:{self.head_port}"


def default_directory() -> Path:
    """The default folder for state."""
    return state_folder("cluster")


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

    def mark(self, node: str) -> str:
        """The mark of everything that is started on a node from this directory, whichever cluster it belongs to."""
        owner = f"{getpass.getuser()}@{socket.gethostname()}:{self.path.absolute()}"
        return f"{hashlib.sha256(owner.encode()).hexdigest()[:12]}/{node}"

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
        # The file's reader takes characters as they are, and not JSON's escapes of their halves.
        text = json.dumps(dataclasses.asdict(state), indent=1, default=_plain, ensure_ascii=False)
        write_private(self.path / STATE_FILE, text + "\n")

    def save_token(self, token: str) -> None:
        """The cluster's password; only ever in files of mode 0600 and on the standard input of our own program."""
        write_private(self.token_path, token)

    def forget_token(self) -> None:
        self.token_path.unlink(missing_ok=True)

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
        """Forget the cluster: after nothing of it is left."""
        self.forget_token()
        (self.path / STATE_FILE).unlink(missing_ok=True)


def write_private(path: Path, text: str) -> None:
    """Leave a file that its owner alone can read. Raises UsageError where the folder cannot be used."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, text.encode(), 0o600)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); give --state a folder of yours") from error


def _plain(value: Any) -> str:
    assert isinstance(value, Path), value
    return str(value)
