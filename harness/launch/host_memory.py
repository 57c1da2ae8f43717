"""Did the kernel run out of host memory? Its own counters say so; a SIGKILL alone does not."""

from __future__ import annotations

from pathlib import Path


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Processes the kernel has killed for memory: in this process's cgroup, else (no counter there) on this host.

    Only the rise between two calls means anything. 0 where the kernel keeps no count.
    """
    for counter in (*_cgroup_counters(proc / "self" / "cgroup", cgroups), proc / "vmstat"):
        count = _field(counter, "oom_kill")
        if count is not None:
            return count
    return 0


def _cgroup_counters(membership: Path, cgroups: Path) -> list[Path]:
    """Files with an `oom_kill` line for the cgroup this process is in; version 2 first, then version 1.

    Inside a container the path named by the kernel may not be visible; the mount's root is then the container's own.
    """
    found: list[Path] = []
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.exists() else []
    for line in sorted(lines):  # "0::/path" is version 2, "4:memory:/path" version 1
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += [cgroups / path.lstrip("/") / "memory.events", cgroups / "memory.events"]
        elif "memory" in controllers.split(","):
            found += [
                cgroups / "memory" / path.lstrip("/") / "memory.oom_control",
                cgroups / "memory" / "memory.oom_control",
            ]
    return found


def _field(file: Path, name: str) -> int | None:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:  # this kernel, or this kind of cgroup, does not have the file
        return None
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None
