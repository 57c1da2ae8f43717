"""Packages of ours that have the name of one which a compared system imports and its environment lacks.

Each folder here is one entry of PYTHONPATH; its module says what it stands for, and by what it computes. Rings over
flash-attn 2 run on CPU ranks with the one for flash_attn, which checks the parallel algorithm around a kernel, and not
the kernel; on GPUs it calls FlashAttention-4 where that is installed and flash-attn 2 is not. Megatron-LM runs with the
one for apex's weight gradients. Records name what computed.
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
