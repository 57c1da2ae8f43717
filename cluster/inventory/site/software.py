"""Where this project lives on the nodes: a shared virtual environment, or a container image."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_SIZE = re.compile(r"\d+[bkmgBKMG]?")
_ULIMIT = re.compile(r"-1|\d+(:(-1|\d+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """The interpreter and the checkout on the nodes; inside the container where the site uses one."""

    python: str | None = None  # absolute path of the interpreter in its environment; null: the path of ours
    folder: str | None = None  # absolute path of this repository; null: the path of ours

    def __post_init__(self) -> None:
        for name, value in (("python", self.python), ("folder", self.folder)):
            if value is not None and not value.startswith("/"):
                raise ValueError(f"software.{name} is {value!r}; expected an absolute path on the nodes, or null")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A folder of the node inside the container."""

    source: str
    target: str | None = None  # null: the same path
    read_only: bool = False

    def __post_init__(self) -> None:
        for path in (self.source, self.target or self.source):
            if not path.startswith("/") or "," in path:
                raise ValueError(f"container.mounts has {path!r}; expected an absolute path without a comma")


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """How a container is started on a node, where one is used at all."""

    engine: Literal["none", "docker"] = "none"
    image: str | None = None  # name:tag
    image_id: str | None = None  # sha256:... that `docker image inspect` must show; null: any image of that name
    gpus: str = "all"  # docker's --gpus; empty: none
    mounts: tuple[Mount, ...] = ()
    network: str = "host"
    ipc: Literal["host", "private", "shareable"] = "host"
    shm_size: str | None = None  # such as 64g; only without ipc: host, which has the node's own /dev/shm
    # Registered memory is locked memory, and NCCL's threads want stack: what NVIDIA's containers ask for.
    ulimits: Mapping[str, str] = field(default_factory=lambda: {"memlock": "-1", "stack": "67108864"})
    privileged: bool = False
    extra_arguments: tuple[str, ...] = ()  # of `docker run`, each one argument

    def __post_init__(self) -> None:
        if self.engine != "none" and not self.image:
            raise ValueError(f"container.engine is {self.engine} but container.image is empty; name the image")
        if self.image is not None and (not self.image or self.image.startswith("-") or len(self.image.split()) != 1):
            raise ValueError(f"container.image is {self.image!r}; expected a name such as burst:latest")
        if self.image_id is not None and not _DIGEST.fullmatch(self.image_id):
            raise ValueError(f"container.image_id is {self.image_id!r}; expected sha256: and 64 hexadecimal digits")
        if self.shm_size is not None and not _SIZE.fullmatch(self.shm_size):
            raise ValueError(f"container.shm_size is {self.shm_size!r}; expected a size such as 64g")
        if self.shm_size is not None and self.ipc == "host":
            raise ValueError("container.shm_size has no effect with ipc: host; give ipc: private, or leave it out")
        for name, value in self.ulimits.items():
            if not name.isalpha() or not _ULIMIT.fullmatch(value):
                raise ValueError(f"container.ulimits has {name}: {value}; expected numbers such as memlock: -1")
