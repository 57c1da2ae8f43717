"""Parts that the tasks share: attention bound to its ranks, progress, and the measurement that ends a trial."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from engine.attention.algorithms.saved import SavedOutput
from engine.attention.comm_volume import Sent
from engine.attention.context import ContextParallel
from engine.distributed import World
from engine.measurement import ALLOCATION_RETRIES, PROGRESS_FILE, Extra, Measurement
from engine.memory.gpu_state import Gpu, read_gpu
from engine.memory.resources import Usage, device_name, software, usage
from engine.method import AttentionFn, NativeMethod
from engine.settings import TrialSettings

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}  # that a trial computes in

OnProgress = Callable[[dict[str, Any]], None]
AroundStep = Callable[[], AbstractContextManager[None]]


class Refused(ValueError):
    """The trial cannot run with these settings on this machine: a result, not an error of the program."""


class Task(Protocol):
    """One trial's work on this rank. Constructing it is the set-up: a ValueError there refuses the trial."""

    def run(self, on_progress: OnProgress, around_step: AroundStep = nullcontext) -> Measurement:
        """Do the work, calling `on_progress` after every step. Collective; every rank returns the same figures.

        Each measured step takes place within a context of its own from `around_step`.
        """
        ...

    def check(self) -> Extra:
        """After `run`, entries of the measurement's `extra`: how far the task's results are from a float64 run, as
        `error`, or why that cannot be said, as `unchecked`; empty where the task forms no such run. Raises every peak.
        Collective."""
        ...

    def again(self) -> None:
        """After `run`, one step more that is not measured. Collective."""
        ...


def context_parallel(settings: TrialSettings, method: NativeMethod, world: World) -> ContextParallel:
    """The ranks of this replica, in the method's layout. Collective over them."""
    layout = method.layout(settings)
    cp = ContextParallel(group=world.cp_group, layout=layout)
    cp.segments(settings.seq_len)  # refuses lengths that do not split
    return cp


class RefusingAttention:
    """A method's attention whose ValueErrors refuse the trial: it knows shapes and dtype only at its first call."""

    def __init__(self, attend: AttentionFn) -> None:
        self._attend = attend
        self.formed = getattr(attend, "formed", None)  # of methods that send q, k and v as each is formed

    def __call__(
        self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, saved: SavedOutput | None = None
    ) -> tuple[Tensor, Tensor]:
        try:
            return self._attend(q_BLND, k_BLKD, v_BLKD, saved=saved)
        except ValueError as error:
            raise Refused(str(error)) from error

    def keep(self, out_BLND: Tensor, lse_BNL: Tensor, tail: float) -> SavedOutput | None:
        return self._attend.keep(out_BLND, lse_BNL, tail)

    def resolved(self) -> dict[str, str]:
        """The value of every `auto`; empty before the first call."""
        return self._attend.resolved()

    def computed_sent(self) -> Sent | None:
        """Bytes this rank sends in one forward and backward, from methods that compute them beforehand; else None."""
        compute = getattr(self._attend, "computed_sent", None)
        return compute() if compute else None

    def annotate(self, figures: Measurement) -> None:
        """Let a compared system add its release and versions to what was measured."""
        if annotate := getattr(self._attend, "annotate", None):
            annotate(figures)


def progress_to(trial_dir: Path) -> OnProgress:
    """Append each step as one JSON line to the trial's progress file."""

    def append(step: dict[str, Any]) -> None:
        with open(trial_dir / PROGRESS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(step, allow_nan=False) + "\n")

    return append


def read_gpus(world: World) -> list[Gpu]:
    """Every rank's GPU as it is now, in rank order; empty on CPUs. Collective. For use outside of timed steps."""
    return [gpu for gpu in world.gather(read_gpu(world.device)) if isinstance(gpu, Gpu)]


def measured(
    world: World,
    cp: ContextParallel,
    before: Sequence[Gpu],
    after: Sequence[Gpu],
    *,
    captured_bytes: int = 0,
    **figures: Any,
) -> Measurement:
    """The trial's measurement: `figures`, and memory and sent bytes of each rank since the last resets. Collective.

    `before` and `after` are the GPUs before the warm-up and right after the last measured step, `captured_bytes` the
    peak of a step that CUDA graphs replayed.
    """
    traffic = cp.traffic
    driver = next((gpu.driver for gpu in after if gpu.driver), "")
    used = usage(world.device, traffic.sent_bytes, traffic.window_bytes, captured_bytes)
    ranks = cast(list[Usage], world.gather(used))
    found = Measurement(
        peak_allocated_bytes=[rank.allocated_bytes for rank in ranks if rank.allocated_bytes is not None],
        peak_reserved_bytes=[rank.reserved_bytes for rank in ranks if rank.reserved_bytes is not None],
        peak_rss_bytes=[rank.rss_bytes for rank in ranks],
        sent_bytes=[rank.sent_bytes for rank in ranks],
        device=device_name(world.device),
        software=software() | ({"driver": driver} if driver else {}),
        gpus=[gpu.digest for gpu in after],
        gpus_before=[gpu.state for gpu in before],
        gpus_after=[gpu.state for gpu in after],
        **figures,
    )
    retries = [rank.retries for rank in ranks]
    if any(retries):
        found.extra[ALLOCATION_RETRIES] = retries
    return found
