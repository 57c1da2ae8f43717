"""Which launcher a run uses."""

from __future__ import annotations

import importlib.util

from harness.launch import Launcher

LAUNCHERS = ("ray", "local")


def default_launcher() -> str:
    """Ray where it is installed, else local."""
    return "ray" if importlib.util.find_spec("ray") is not None else "local"


def make_launcher(name: str) -> Launcher:
    """A launcher by name, for this machine. Raises UsageError when it cannot be used here."""
    if name == "ray":
        from harness.launch.ray.launcher import RayLauncher

        return RayLauncher()
    assert name == "local", name
    from harness.launch.local import LocalLauncher

    return LocalLauncher()
