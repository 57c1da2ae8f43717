"""What a node check compares a node with: its GPUs, and how much of its memory and disks may be in use."""

from __future__ import annotations

from dataclasses import dataclass


def check_percent(name: str, value: float) -> None:
    if not 0 < value <= 100:
        raise ValueError(f"{name} is {value:g}; expected a percentage above 0 and at most 100")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuExpectation:
    """GPUs of every node."""

    count: int | None = None  # null takes whatever is there, 0 expects none
    model: str = ""  # part of the name nvidia-smi prints, such as H200; empty takes any

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 0:
            raise ValueError(f"gpus.count is {self.count}; expected 0 or more, or null for whatever is there")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuMemoryLimit:
    """GPU memory in use beyond which somebody else is on the node.

    Sources: 15 MiB on one GPU, facebookresearch/gcm; 100 MB over all of them, check.sh of the BurstEngine artifact.
    """

    one_gpu_mib: float = 15.0
    all_gpus_mib: float = 100.0
    tries: int = 3  # a process that has just ended leaves its memory behind for a moment
    wait_seconds: float = 3.0

    def __post_init__(self) -> None:
        if self.one_gpu_mib < 0 or self.all_gpus_mib < 0:
            raise ValueError("gpu_memory has a limit below 0; give 0 or more MiB")
        if not 1 <= self.tries <= 20:
            raise ValueError(f"gpu_memory.tries is {self.tries}; expected 1 to 20")
        if not 0 <= self.wait_seconds <= 60:
            raise ValueError(f"gpu_memory.wait_seconds is {self.wait_seconds}; expected 0 to 60")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemoryLimit:
    """Host memory in use, in percent of all there is."""

    warn_percent: float = 90.0

    def __post_init__(self) -> None:
        check_percent("host_memory.warn_percent", self.warn_percent)


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskLimit:
    """One path that must have room. Percentages are of the space an unprivileged user can have, as `df` counts it."""

    path: str
    warn_percent: float = 90.0
    fail_percent: float = 95.0  # source: imbue-ai/cluster-health

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"disks has the path {self.path!r}; expected an absolute path such as /data")
        check_percent(f"fail_percent of {self.path}", self.fail_percent)
        check_percent(f"warn_percent of {self.path}", self.warn_percent)
        if self.warn_percent > self.fail_percent:
            raise ValueError(
                f"{self.path} warns at {self.warn_percent:g}% but fails at {self.fail_percent:g}% already; "
                "give warn_percent at most fail_percent"
            )
