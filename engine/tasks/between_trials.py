"""Clears a rank's process after one trial when another follows in it.

The next trial must measure the same as in a process of its own. Imported modules, the CUDA context, and compiled
kernels of libraries whose cache keys are complete stay: they only save time.
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

CACHING = ("engine.attention.", "baselines.")  # their modules cache results, and with them device memory
_FORGET_PEAK = "5"  # resets the peak of resident memory: proc_pid_clear_refs(5)


def clear() -> None:
    """Free the memory of a trial to whose objects no reference is left, and reset all peaks."""
    _clear_caches()
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


def _clear_caches() -> None:
    """Empty the caches of modules: results of cached functions, and tensors for later calls."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(CACHING):
            continue
        for value in list(vars(module).values()):
            if isinstance(value, dict) and any(isinstance(kept, Tensor) for kept in value.values()):
                value.clear()
            elif hasattr(value, "cache_clear") and value.__module__ == name:
                value.cache_clear()


def log_to(path: Path) -> None:
    """Append all later output of this process, that of libraries below Python included, to `path`."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)
