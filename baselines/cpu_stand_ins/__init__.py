"""Packages that stand in, on CPU ranks, for kernels that systems import and that need a GPU.

A system runs with one where its environment has no real package of that name. That checks the parallel algorithm
around the kernel, and not the kernel; a stand-in refuses tensors on a GPU.
"""

from pathlib import Path

STAND_INS = Path(__file__).parent
