"""The parallel sizes with which a run goes on on fewer ranks than before."""

from __future__ import annotations

from dataclasses import replace

from engine.training.config import TrainingConfig
from harness.machine.this_machine import Machine
from harness.plan.matrix import unsupported_reason


def settings_that_fit(config: TrainingConfig, machine: Machine) -> dict[str, int] | None:
    """Values of world_size, cp_size and gradient_accumulation that differ from the run's, such that it goes on here
    with the same sequences per step; empty where its own will do, None where no others were found.

    As many ranks as possible are taken, and of these arrangements the one with the most context-parallel ranks.
    """
    now = config.settings
    accumulated = now.gradient_accumulation * now.dp_size  # micro-batches of a step, over all replicas
    for ranks in range(min(machine.max_ranks, now.world_size), 0, -1):
        for cp_size in range(now.cp_size, 0, -1):
            replicas, rest = divmod(ranks, cp_size * now.tp_size)
            if rest or not replicas or accumulated % replicas or now.cp_size % cp_size:
                continue
            accumulation = accumulated // replicas
            changed = replace(now, world_size=ranks, cp_size=cp_size, gradient_accumulation=accumulation)
            if unsupported_reason(changed, machine) is None:
                names = ("world_size", "cp_size", "gradient_accumulation")
                return {name: getattr(changed, name) for name in names if getattr(changed, name) != getattr(now, name)}
    return None
