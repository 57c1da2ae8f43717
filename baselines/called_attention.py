"""A compared system's attention as the engine's worker runs it, in the interpreter of that system.

Nothing here, and nothing that a module of a system imports at its top, needs more than torch, numpy and the engine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baselines.programs.program_parts import load
from baselines.upstream import UPSTREAM, StartedSystem, described
from engine.method import EngineCommand
from engine.reader import from_json

if TYPE_CHECKING:
    from baselines.called import InWorker
    from engine.attention.algorithms.saved import SavedOutput
    from engine.attention.context import ContextParallel
    from engine.attention.geometry.layout import Layout
    from engine.measurement import Measurement
    from engine.settings import TrialSettings

ENTERED = "BURST_UPSTREAM"  # variable with the installation that this interpreter is of: {"ran": ..., "source": ...}
NO_KERNEL = "stand-in"  # computes dense attention on CPU ranks, and measures no kernel


class CalledMethod(EngineCommand):
    """What the worker asks of a method."""

    def __init__(self, adapter: InWorker) -> None:
        self.adapter = adapter
        self.name, self.system, self.source = adapter.name, adapter.system, adapter.source

    def refuse(self, settings: TrialSettings) -> str | None:
        return self.adapter.refuse(settings)

    def layout(self, settings: TrialSettings) -> Layout:
        return self.adapter.shards(settings)

    def attention(self, cp: ContextParallel, settings: TrialSettings, mask: str | None = None) -> CalledAttention:
        assert mask is None, "task attention alone, which has one mask"
        return CalledAttention(self.adapter, cp, settings)


class OutputAlone:
    """An `AttentionFn` of task attention, which neither recomputes nor has a model: of functions that give no LSE."""

    def __call__(
        self,
        q_BLND: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        *,
        sinks_N: Tensor | None = None,
        saved: SavedOutput | None = None,
        expand_NXC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(out_BLND, nothing)."""
        assert saved is None, "task attention alone, which recomputes nothing"
        assert sinks_N is None, "task attention alone, which has no model"
        assert expand_NXC is None, "task attention alone, which has no model"
        return self.output(q_BLND, k_BLKD, v_BLKD), torch.empty(0)

    def output(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        """out_BLND, differentiable."""
        raise NotImplementedError

    def keep(self, out_BLND: Tensor, lse_BNL: Tensor, tail: float) -> SavedOutput | None:
        return None


class CalledAttention(OutputAlone):
    """The system's function among the ranks of `cp`. Creating one is collective; a ValueError refuses the trial, so
    those that the system raises become RuntimeErrors."""

    def __init__(self, adapter: InWorker, cp: ContextParallel, settings: TrialSettings) -> None:
        entered = json.loads(os.environ[ENTERED])
        self._adapter, self._settings = adapter, settings
        self._ran = from_json(StartedSystem, entered["ran"])
        request = adapter.request(settings, Path(entered["source"]))
        call = load(str(request["call"]))
        self._kernel: Callable[[], str] = getattr(call, "kernel", flash_attn_kernel)
        try:
            self._attend = call.prepare(request, cp.group)
            forget_shapes()
            found = self._kernel()
        except ValueError as error:
            raise RuntimeError(f"{adapter.system}: {error}") from error
        if found and settings.kernel not in ("auto", found):
            raise ValueError(
                f"{adapter.system} has kernel {found} in its environment here, found kernel {settings.kernel}; set "
                f"kernel to auto or {found}"
            )

    def output(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> Tensor:
        try:
            out_BLND: Tensor = self._attend(q_BLND, k_BLKD, v_BLKD)
        except ValueError as error:
            raise RuntimeError(f"{self._adapter.system}: {error}") from error
        return out_BLND

    def resolved(self) -> dict[str, str]:
        settings = self._settings
        return {
            "kernel": self._kernel() or NO_KERNEL,
            "layout": self._adapter.shards(settings).name,
            "schedule": self._adapter.schedule_of(settings),
            "arrangement": self._adapter.arrangement(settings),
        }

    def annotate(self, figures: Measurement) -> None:
        """Add the system's release, pin and packages to what was measured."""
        figures.software = dict(self._ran.packages) | figures.software
        figures.extra[UPSTREAM] = described(self._ran)


def flash_attn_kernel() -> str:
    """What computes attention of a block for callers of flash_attn: its release 2, or what the stand-in names; "" where
    that is no kernel."""
    import flash_attn

    kernel: str = getattr(flash_attn, "KERNEL", "fa2")
    return kernel


def forget_shapes() -> None:
    """Empty the caches of functions that TorchScript compiled, torch's own left out.

    It fuses a function for the first shapes that it sees, more generally for others, and not at all after some. A trial
    among others has to meet it as one in a process of its own does.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch":
            for value in list(getattr(module, "__dict__", {}).values()):
                if isinstance(value, torch.jit.ScriptFunction):
                    value._debug_flush_compilation_cache()
