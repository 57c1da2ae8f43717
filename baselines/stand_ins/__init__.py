"""Packages of ours that have the name of one which a compared system imports and its environment lacks.

Each folder here is one entry of PYTHONPATH; the first line of its module says what it stands for, and by what it
computes. `baselines.attempt` starts the artifact's programs with them on one GPU with a newer Python and torch. CPU
ranks use those in `ON_CPU_RANKS`, which checks the parallel algorithm around a kernel, and not the kernel. Megatron-LM
runs with the one for apex's weight gradients. GPUs use the one for flash_attn where FlashAttention-4 is installed and
flash-attn 2 is not: it calls that kernel, and records name it. No other trial uses a stand-in: a result obtained with
one says nothing about the speed of the kernel that it replaces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
# Packages that need a GPU, by the names of their modules; the stand-in computes on CPU ranks.
ON_CPU_RANKS = ("flash_attn",)
# On GPUs the stand-in computes by another package: its folder inside the package of the same name, and the
# distributions it comes in, which an environment takes from beside torch as it would take the real package.
ON_GPUS = {"flash_attn": "cute"}
INSTEAD = {"flash-attn": ("flash-attn-4", "nvidia-cutlass-dsl-libs-cu13")}


def python_path(names: Iterable[str]) -> str:
    """PYTHONPATH with the stand-ins of these names."""
    return os.pathsep.join(str(FOLDER / name) for name in names)
