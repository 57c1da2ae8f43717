"""Packages of ours that have the name of one which a compared system imports and its environment lacks.

Each folder here is one entry of PYTHONPATH; its module says what it stands for, and by what it computes. Rings over
flash-attn 2 run on CPU ranks with the one for flash_attn, which checks the parallel algorithm around a kernel, and not
the kernel; on GPUs it calls FlashAttention-4 where that is installed and flash-attn 2 is not. Megatron-LM runs with the
one for apex's weight gradients. Records name what computed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent
FLASH_ATTN, FLASH_ATTN_PACKAGE = "flash_attn", "flash-attn"  # module and distribution that a stand-in may replace
# What that one computes with on GPUs: a folder in a package of the same name, and the distributions that it comes in,
# which an environment takes from beside torch as it would take the real package.
FLASH_ATTN_4, FLASH_ATTN_4_PACKAGES = "cute", ("flash-attn-4", "nvidia-cutlass-dsl-libs-cu13")


def python_path(names: Iterable[str]) -> str:
    """PYTHONPATH with the stand-ins of these names."""
    return os.pathsep.join(str(FOLDER / name) for name in names)


def import_flash_attn_stand_in(device: str) -> None:
    """Let this process import the stand-in as `flash_attn` where that is not installed, and on the CPU, for which the
    package has no kernel. Call it before `flash_attn` is imported."""
    place = str(FOLDER / FLASH_ATTN)
    if place not in sys.path and (device == "cpu" or importlib.util.find_spec(FLASH_ATTN) is None):
        sys.path.insert(0, place)
