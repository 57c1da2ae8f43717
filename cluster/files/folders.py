"""Where programs keep what is theirs on this machine, by the XDG base directory specification."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder(name: str) -> Path:
    """For what must outlive a program: counters of nodes, a cluster that is up."""
    return _base("XDG_STATE_HOME", Path(".local", "state")) / "burst" / name


def cache_folder(name: str) -> Path:
    """For what can be made again."""
    return _base("XDG_CACHE_HOME", Path(".cache")) / "burst" / name


def _base(variable: str, below_home: Path) -> Path:
    chosen = Path(os.environ.get(variable, ""))
    return chosen if chosen.is_absolute() else Path.home() / below_home  # relative ones must be ignored, it says
