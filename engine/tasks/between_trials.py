"""What a rank gives back when one trial has ended and another follows in the same process.

The next trial must measure what it would measure in a process of its own. What stays is what only costs time to get:
imported modules, the CUDA context, compiled kernels of libraries that key them by all that matters.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path

import torch
import torch._dynamo
from torch import Tensor

REMEMBERING = ("engine.attention.", "baselines.")  # their modules keep results, and with them device memory
_FORGET_PEAK = "5"  # what resets the peak of resident memory: proc_pid_clear_refs(5)


def clear() -> None:
    """Free the memory of a trial whose objects nobody refers to any more, and start all peaks anew."""
    _forget_results()
    # Graphs of another length would be compiled for any length, and would count towards the limit of recompilations.
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # or they count in the next trial's peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # a kernel without it counts the largest trial so far
        Path("/proc/self/clear_refs").write_text(_FORGET_PEAK, encoding="ascii")


def _forget_results() -> None:
    """Empty what modules keep: the results of functions that cache them, and tensors for later calls."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(REMEMBERING):
            continue
        for value in list(vars(module).values()):
            if isinstance(value, dict) and any(isinstance(kept, Tensor) for kept in value.values()):
                value.clear()
            elif hasattr(value, "cache_clear") and value.__module__ == name:
                value.cache_clear()


def log_to(path: Path) -> None:
    """Send everything this process prints from now on, and what libraries print below Python, to the end of `path`."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)
