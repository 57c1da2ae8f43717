"""Task lm_head: LM head and loss alone, forward and backward, on random hidden states of this rank's tokens.

Every rank computes its own `seq_len / cp_size` tokens of each sequence with a whole weight, as in training once the
weight is gathered; nothing is sent. Small problems are also compared with a plain float64 run.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from engine.distributed import World
from engine.lm_head.loss import LossSum, plain_loss_sum, tile_tokens
from engine.lm_head.loss_kernel import forms_tiles, loss_sum_of
from engine.measurement import Extra, Measurement, relative_errors
from engine.memory.resources import reset_peaks
from engine.method import NativeMethod
from engine.ops import LM_HEAD
from engine.ops.autograd import accumulation_dtype
from engine.settings import TrialSettings
from engine.tasks.task import (
    DTYPES,
    AroundStep,
    OnProgress,
    StepClock,
    context_parallel,
    measured,
    of_measured_steps,
    read_gpus,
    timed,
)

CHECKED_LOGITS = {"cuda": 1 << 28, "cpu": 1 << 22}  # up to this many a plain float64 run fits and is quick
LOGIT_DEVIATION = 2.0  # of the random logits: a softmax that is neither flat nor peaked at one word
_NAMES = ("loss", "dhidden", "dweight")
_GIB = 1 << 30


class HeadTask:
    """Hidden states, weight and labels of one trial on this rank. Raises ValueError when the settings cannot run."""

    def __init__(self, settings: TrialSettings, method: NativeMethod, world: World) -> None:
        self.settings, self.world = settings, world
        self.loss_sum: LossSum = loss_sum_of(settings, world.device.type)
        self.cp = context_parallel(settings, method, world)
        tokens, shape = settings.seq_len // settings.cp_size * settings.batch_size, settings.model
        generator = torch.Generator(world.device).manual_seed(settings.seed + 1 + world.rank)
        kind = {"generator": generator, "device": world.device}
        dtype = DTYPES[settings.dtype]
        self.hidden_TE = torch.randn(tokens, shape.hidden, dtype=dtype, **kind).requires_grad_()
        weight_VE = torch.randn(shape.vocab, shape.hidden, dtype=dtype, **kind)
        self.weight_VE = weight_VE.mul_(LOGIT_DEVIATION / shape.hidden**0.5).requires_grad_()
        self.labels_T = torch.randint(shape.vocab, (tokens,), **kind)

    def run(self, on_progress: OnProgress, around_step: AroundStep = nullcontext) -> Measurement:
        """Time forward and backward of the mean loss, `steps.measured` times after the warm-up."""
        plan = self.settings.steps
        seconds: list[tuple[float, float]] = []
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        before = read_gpus(self.world)
        for index in range(plan.total):
            if index == plan.warmup:
                reset_peaks(self.world.device)
            with around_step() if index >= plan.warmup else nullcontext():
                (loss, gradients), elapsed = timed(self.world, self._step)
            seconds.append(elapsed)
            losses.append(loss)
            norms.append(
                torch.stack([torch.linalg.vector_norm(g, dtype=accumulation_dtype(g.dtype)) for g in gradients]).norm()
            )
            del gradients  # before the next step forms its own
            on_progress({"step": index + 1, "of": plan.total, "seconds": seconds[-1][1]})
        after = read_gpus(self.world)
        forward_seconds, step_seconds = map(list, zip(*seconds, strict=True))
        times = of_measured_steps(self.world, plan, step_seconds, forward_seconds)
        figures = measured(
            self.world,
            self.cp,
            before,
            after,
            replace(
                times,
                loss=self._summed(losses),
                grad_norm=[square**0.5 for square in self._summed([norm.square() for norm in norms])],
                chosen=self._chosen(),
                extra=times.extra | {"held_gib": self._held_bytes() / _GIB},
            ),
        )
        return figures

    def check(self) -> Extra:
        """The errors of small problems; larger ones have no float64 run."""
        small = self.labels_T.numel() * self.settings.model.vocab <= CHECKED_LOGITS[self.world.device.type]
        return {"error": self._errors()} if small else {}

    def again(self) -> None:
        """One more forward and backward, from the same start as the timed ones."""
        timed(self.world, self._step)

    def _step(self, clock: StepClock) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._forward_backward(self.loss_sum, clock)

    def _forward_backward(self, loss_sum: LossSum, clock: StepClock | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """This rank's share of the mean loss over all tokens, and the gradients of hidden states and weight."""
        with record_function(LM_HEAD):
            loss = loss_sum(self.hidden_TE, self.weight_VE, self.labels_T) / (self.labels_T.numel() * self.world.size)
        if clock is not None:
            clock.mark()
        return loss.detach(), torch.autograd.grad(loss, (self.hidden_TE, self.weight_VE))

    def _summed(self, values: list[Tensor]) -> list[float]:
        """Sums over all ranks. Collective."""
        total = torch.stack(values).double()
        dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def _chosen(self) -> dict[str, str]:
        """The tile of the engine's own fused form, tokens x words."""
        if not forms_tiles(self.settings):
            return {}
        vocabulary = self.settings.model.vocab
        return {"tile": f"{tile_tokens(vocabulary, self.hidden_TE, self.settings.head_tiles)} x {vocabulary}"}

    def _held_bytes(self) -> int:
        """Bytes any implementation must hold on this rank: hidden states, weight, their gradients, and the labels."""
        held = (self.hidden_TE, self.weight_VE)
        return 2 * sum(tensor.nbytes for tensor in held) + self.labels_T.nbytes

    def _errors(self) -> dict[str, float]:
        """Relative error (Frobenius norms) of loss and gradients against a plain float64 run, the worst rank's."""
        loss, gradients = self._forward_backward(self.loss_sum)
        hidden_TE, weight_VE = (t.detach().double().requires_grad_() for t in (self.hidden_TE, self.weight_VE))
        exact = plain_loss_sum(hidden_TE, weight_VE, self.labels_T, self.settings.z_loss)
        exact = exact / (self.labels_T.numel() * self.world.size)
        truths = (exact.detach(), *torch.autograd.grad(exact, (hidden_TE, weight_VE)))
        ranks = self.world.gather(relative_errors((loss, *gradients), truths))
        return {name: max(errors) for name, errors in zip(_NAMES, zip(*ranks, strict=True), strict=True)}
