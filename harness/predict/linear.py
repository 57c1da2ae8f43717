"""What the ranks of linear layers wait for: tokens in another order, inputs of the rank before, and states."""

from __future__ import annotations

import numpy as np

from engine.attention.problem import Problem
from engine.linear.volume import sent_bytes
from engine.settings import TrialSettings
from harness.metrics.hardware import HardwareSpeeds
from harness.metrics.throughput import GIB
from harness.predict.attention import Pass


def linear_layers_waiting(settings: TrialSettings, problem: Problem, speeds: HardwareSpeeds, across: float) -> Pass:
    """Of one forward or one backward of all linear layers, which send equally many bytes: those of the rank that sends
    most, over its links inside the node and of `across` GiB/s to other nodes, one after the other. No kernels: those of
    the recurrence are among the matrix products."""
    if not any(settings.model.linear_layers) or problem.cp_size == 1:
        return Pass(kernels=0.0)
    sent = sent_bytes(
        settings.model, problem.layout, problem.seq_len, problem.cp_size, dtype=settings.dtype, batch_size=problem.batch
    )
    node = np.arange(problem.cp_size) // problem.node_size
    same = node[:, None] == node
    inside, between = (int((sent * where).sum(1).max()) for where in (same, ~same))
    return Pass(kernels=0.0, inside=inside / (speeds.inside_gib * GIB), across=between / (across * GIB))
