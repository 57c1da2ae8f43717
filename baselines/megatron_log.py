"""The lines of Megatron-LM's training log, of its copy in the paper's artifact, and of Megatron-DeepSpeed.

Each iteration is one line of `name: value` between bars, printed by the last rank. Names that are not of the loss and
norm are the system's own figures, and kept as it calls them.
"""

from __future__ import annotations

import re
from typing import Any

from baselines.upstream import PrintedSteps

_ITERATION = re.compile(r"iteration +\d+/ *\d+ \|(.*)$", re.MULTILINE)
_FIELD = re.compile(r" *([^|:]+?(?:\([^)]*\))?): +(\S+)(?: GB)? *")
_MEMORY = re.compile(r"max allocated: ([\d.]+) \| reserved: [\d.]+ \| max reserved: ([\d.]+)")
_MIB = 1 << 20  # which it prints as MB
_SECONDS, _LOSS, _NORM = "elapsed time per iteration (ms)", "lm loss", "grad norm"
_FIGURES = (
    "throughput per GPU",
    "Token per GPU",
    "tokens per gpu per second",
    "samples per second",
    "TFLOPs",
    "Max Mem",
)


def parse_iterations(output: str) -> PrintedSteps:
    """Steps, losses, norms and memory of one rank's log; the system's own figures are those of its last iteration."""
    iterations = [dict(_FIELD.findall(line)) for line in _ITERATION.findall(output)]
    memory = _MEMORY.findall(output)
    last: dict[str, Any] = iterations[-1] if iterations else {}
    return PrintedSteps(
        step_seconds=[float(one[_SECONDS]) / 1000 for one in iterations if _SECONDS in one],
        loss=[float(one[_LOSS]) for one in iterations if _LOSS in one],
        grad_norm=[float(one[_NORM]) for one in iterations if _NORM in one],
        peak_allocated_bytes=[int(float(memory[-1][0]) * _MIB)] if memory else [],
        peak_reserved_bytes=[int(float(memory[-1][1]) * _MIB)] if memory else [],
        own={name: float(value) for name, value in last.items() if name.startswith(_FIGURES)},
    )
