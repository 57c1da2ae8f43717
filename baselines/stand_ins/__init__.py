"""Packages of ours that have the name of one which a compared system imports and its environment lacks.

Each folder here is one entry of PYTHONPATH; the first line of its module says what it stands for, and by what it
computes. `baselines.attempt` starts the artifact's programs with them on one GPU with a newer Python and torch. CPU
ranks use those in `ON_CPU_RANKS`, which checks the parallel algorithm around a kernel, and not the kernel. Megatron-LM
runs with the one for apex's weight gradients. No other trial uses a stand-in: a result obtained with one says nothing
about the speed of the kernel that it replaces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
# Packages that need a GPU, by the names of their modules; the stand-in computes on CPU ranks.
ON_CPU_RANKS = ("flash_attn",)


def python_path(names: Iterable[str]) -> str:
    """PYTHONPATH with the stand-ins of these names."""
    return os.pathsep.join(str(FOLDER / name) for name in names)
