"""Task linear: the recurrence of one linear layer alone, forward and backward, on random inputs of the model's shape.

Every rank has consecutive tokens, and documents of the mask start from a state of 0. Each call is timed on its slowest
rank, from a common start and with a cold L2 cache, as between the matmuls of a model. Small problems are also compared
with the recurrence token by token in float64 (`engine.linear.reference`).

Shape letters as in `engine.models.linear`.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.distributed import World
from engine.linear.kernels import kernel_of
from engine.linear.reference import recurrence
from engine.linear.runs import runs_of
from engine.linear.shard import LinearShard
from engine.measurement import Extra, Measurement, relative_errors
from engine.memory.resources import reset_peaks
from engine.method import NativeMethod, RecurrenceMethod
from engine.ops.autograd import accumulation_dtype
from engine.settings import TrialSettings
from engine.tasks.task import (
    DTYPES,
    AroundStep,
    OnProgress,
    StepClock,
    context_parallel,
    documents_of,
    l2_flush,
    measured,
    of_measured_steps,
    read_gpus,
    timed,
)

# Up to so many numbers in the states of all tokens a float64 run, which keeps a few of each, fits and is quick.
CHECKED_STATES = {"cuda": 1 << 29, "cpu": 1 << 22}
_NAMES = ("out", "dq", "dk", "dv", "ddecay", "dbeta")


class LinearTask:
    """Inputs and recurrence of one trial on this rank. Raises ValueError when the settings do not fit together."""

    def __init__(self, settings: TrialSettings, method: NativeMethod, world: World) -> None:
        self.settings, self.world = settings, world
        self.cp = context_parallel(settings, method, world)
        tokens, shape = settings.seq_len // self.cp.size, settings.model
        documents = documents_of(settings)
        self.lengths = () if documents is None else tuple(documents.lengths_in(settings.seq_len))
        runs = runs_of(self.lengths or None, self.cp.rank * tokens, tokens)
        self.recur = cast(RecurrenceMethod, method).recurrence(LinearShard(runs, self.cp))
        numbers = shape.linear_heads * shape.linear_key_dim * shape.linear_value_dim
        self.small = settings.batch_size * settings.seq_len * numbers <= CHECKED_STATES[world.device.type]
        if self.small:  # the same on every number of ranks
            shards = [self.cp.shard(whole, dim=1).clone() for whole in self._drawn(settings.seq_len, settings.seed)]
        else:
            shards = self._drawn(tokens, settings.seed + 1 + world.rank)
        self.inputs = tuple(shard.requires_grad_() for shard in shards[:-1])
        self.dout_BLVP = shards[-1]

    def _drawn(self, tokens: int, seed: int) -> list[Tensor]:
        """q, k, v, the logarithm of the decay, for the delta rule beta, and the gradient of the output."""
        shape, dtype = self.settings.model, DTYPES[self.settings.dtype]
        generator = torch.Generator(self.world.device).manual_seed(seed)

        def normal(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            size = (self.settings.batch_size, tokens, *sizes)
            return torch.randn(size, dtype=dtype, generator=generator, device=self.world.device)

        key, value = (shape.linear_key_heads, shape.linear_key_dim), (shape.linear_heads, shape.linear_value_dim)
        q_BLHN, k_BLHN, v_BLVP = normal(*key), normal(*key), normal(*value)
        # Gates as models have them; a state outlives 30 tokens, as in models before training.
        decay_BLV = -F.softplus(normal(shape.linear_heads, dtype=accumulation_dtype(dtype)) - 4)
        beta = [normal(shape.linear_heads).sigmoid()] if shape.linear == "gated_delta_net" else []
        return [q_BLHN, k_BLHN, v_BLVP, decay_BLV, *beta, normal(*value)]

    def run(self, on_progress: OnProgress, around_step: AroundStep = nullcontext) -> Measurement:
        """Time forward and backward, `steps.measured` times after the warm-up."""
        plan, flush = self.settings.steps, l2_flush(self.world.device)
        seconds: list[tuple[float, float]] = []
        before = read_gpus(self.world)
        for index in range(plan.total):
            if index == plan.warmup:
                reset_peaks(self.world.device)
            self.cp.traffic.reset()
            with around_step() if index >= plan.warmup else nullcontext():
                # Of what a call returns only the time stays: the next one forms its own gradients.
                seconds.append(timed(self.world, self._forward_backward, flush)[1])
            on_progress({"step": index + 1, "of": plan.total, "seconds": seconds[-1][1]})
        after = read_gpus(self.world)
        forward_seconds, step_seconds = map(list, zip(*seconds, strict=True))
        figures = replace(
            of_measured_steps(self.world, plan, step_seconds, forward_seconds),
            chosen={"linear_kernel": kernel_of(self.world.device.type, DTYPES[self.settings.dtype])},
        )
        return measured(self.world, self.cp, before, after, figures)

    def check(self) -> Extra:
        """The errors of small problems; larger ones have no float64 run."""
        return {"error": self._errors()} if self.small else {}

    def again(self) -> None:
        """One more forward and backward, from the same start as the timed ones."""
        timed(self.world, self._forward_backward, l2_flush(self.world.device))

    def _forward_backward(self, clock: StepClock | None = None) -> tuple[Tensor, ...]:
        """Out and the gradient of every input, of this rank's tokens."""
        out_BLVP = self.recur(*self.inputs)
        if clock is not None:
            clock.mark()
        return (out_BLVP.detach(), *torch.autograd.grad(out_BLVP, self.inputs, self.dout_BLVP))

    def _errors(self) -> dict[str, float]:
        """Relative error (Frobenius norms) of out and of every gradient against float64, the worst rank's."""
        found = self._forward_backward()
        *inputs, dout = (whole.double() for whole in self._drawn(self.settings.seq_len, self.settings.seed))
        q, k, v, decay, *beta = (each.requires_grad_() for each in inputs)
        out = recurrence(q, k, v, decay, beta[0] if beta else None, self.lengths)
        truths = (out.detach(), *torch.autograd.grad(out, inputs, dout))
        ranks = self.world.gather(relative_errors(found, [self.cp.shard(truth, dim=1) for truth in truths]))
        return {name: max(errors) for name, errors in zip(_NAMES, zip(*ranks, strict=True), strict=False)}
