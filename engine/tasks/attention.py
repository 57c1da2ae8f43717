"""Task attention: the method's attention alone, forward and backward, on random q, k and v.

Each call is timed on its slowest rank, from a common start and with a cold L2 cache, as between the matmuls of a
model. Each trial is compared with dense float64 after its last measured step (`engine.tasks.check_attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.masks import parse_mask
from engine.distributed import World
from engine.measurement import Extra, Measurement
from engine.memory.resources import reset_peaks
from engine.method import NativeMethod
from engine.settings import TrialSettings
from engine.tasks.check_attention import DENSE_TOKENS, attention_errors
from engine.tasks.speeds import LinkProbes
from engine.tasks.task import (
    DTYPES,
    AroundStep,
    InsideStep,
    OnProgress,
    RefusingAttention,
    context_parallel,
    l2_flush,
    measured,
    of_measured_steps,
    read_gpus,
    timed,
)


class AttentionTask:
    """Inputs and attention of one trial on this rank. Raises ValueError when the settings do not fit together."""

    def __init__(self, settings: TrialSettings, method: NativeMethod, world: World) -> None:
        self.settings, self.world = settings, world
        self.cp = context_parallel(settings, method, world)
        self.inside = InsideStep(world.device, world.rank)
        self.attend = RefusingAttention(method.attention(self.cp, settings))
        # q, k, v and the gradient of out. Short problems have the same on every number of ranks.
        if settings.seq_len <= DENSE_TOKENS:
            # Memory of their own, as at other lengths: TransformerEngine takes no tensor that begins inside another.
            whole = self._inputs(settings.seq_len, seed=settings.seed)
            shards = [self.cp.shard(tensor, dim=1).clone() for tensor in whole]
        else:
            shards = self._inputs(settings.seq_len // self.cp.size, seed=settings.seed + 1 + world.rank)
        self.q_BLND, self.k_BLKD, self.v_BLKD = (shard.requires_grad_() for shard in shards[:3])
        self.dout_BLND = shards[3]

    def _inputs(self, tokens: int, seed: int) -> list[Tensor]:
        """q, k, v, dout of `tokens` tokens, standard normal."""
        shape, batch = self.settings.model, self.settings.batch_size
        generator = torch.Generator(self.world.device).manual_seed(seed)
        return [
            torch.randn(batch, tokens, heads, shape.head_dim, generator=generator, device=self.world.device).to(
                DTYPES[self.settings.dtype]
            )
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        ]

    def run(self, on_progress: OnProgress, around_step: AroundStep = nullcontext) -> Measurement:
        """Time forward alone and forward with backward, `steps.measured` times each after the warm-up.

        `around_step` is for forward with backward.
        """
        plan, flush = self.settings.steps, l2_flush(self.world.device)
        forward_seconds, step_seconds = [], []
        before = read_gpus(self.world)
        link = LinkProbes(self.world, self.cp, plan, message=self.q_BLND)
        for index in range(plan.total):
            link.before_step(index)
            if index == plan.warmup:
                reset_peaks(self.world.device)
            with self.inside.step(on_progress, index + 1, plan.total, self.settings.seq_len):
                forward_seconds.append(self._timed(self._forward, flush))
                self.cp.traffic.reset()
                with around_step() if index >= plan.warmup else nullcontext():
                    step_seconds.append(self._timed(self._step, flush))
            on_progress({"step": index + 1, "of": plan.total, "seconds": step_seconds[-1]})
        after = read_gpus(self.world)
        figures = measured(
            self.world,
            self.cp,
            before,
            after,
            replace(of_measured_steps(self.world, plan, step_seconds, forward_seconds), chosen=self.attend.resolved()),
        )
        self.attend.annotate(figures)
        if (computed := self.attend.computed_sent()) is not None:
            sent = self.world.gather((computed.total, computed.far))
            figures.extra["computed_sent_bytes"], between = map(list, zip(*sent, strict=True))
            if any(between):
                figures.extra["computed_sent_between_nodes_bytes"] = between
        figures.extra |= link.figures()  # last, because it would raise every peak
        return figures

    def check(self) -> Extra:
        shards = (self.q_BLND, self.k_BLKD, self.v_BLKD, self.dout_BLND)
        return attention_errors(self.world, self.cp, shards, parse_mask(self.settings.mask), self._forward_backward)

    def again(self) -> None:
        """One more forward with backward, from the same start as the timed ones."""
        self._timed(self._step, l2_flush(self.world.device))

    def _forward(self) -> None:
        self.inside.mark("forward alone")
        with torch.no_grad():
            self.attend(self.q_BLND, self.k_BLKD, self.v_BLKD)

    def _step(self) -> None:
        self._forward_backward(self.dout_BLND)

    def _forward_backward(self, dout_BLND: Tensor) -> tuple[Tensor, ...]:
        """(out, dq, dk, dv) of this rank's tokens."""
        self.inside.mark("forward")
        out_BLND, _lse = self.attend(self.q_BLND, self.k_BLKD, self.v_BLKD)
        self.inside.mark("backward")
        inputs = (self.q_BLND, self.k_BLKD, self.v_BLKD)
        return (out_BLND.detach(), *torch.autograd.grad(out_BLND, inputs, dout_BLND))

    def _timed(self, work: Callable[[], object], flush: Tensor) -> float:
        """Seconds of one call on this rank, all ranks starting together."""
        return timed(self.world, lambda _clock: work(), flush)[1][1]
