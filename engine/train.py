"""Task train: optimizer steps on real text, each timed on its slowest rank.

Loss and gradients are those of the mean over all target tokens of all sequences of the step, whatever ranks hold them:
every rank contributes the sum over its tokens divided by the global count, and FSDP2 adds the ranks' gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.attention.context import ContextParallel
from engine.clock import StepClock
from engine.data import open_tokens
from engine.data.sequences import Sequences
from engine.distributed import World
from engine.lm_head import IGNORE
from engine.measurement import Measurement
from engine.method import NativeMethod
from engine.model import Decoder
from engine.parallelize import build_model
from engine.recipe import Recipe
from engine.resources import reset_peaks
from engine.settings import TrialSettings, vocabulary_refusal
from engine.task import OnProgress, RefusingAttention, context_parallel, measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """This rank's tokens of one step."""

    tokens_BL: Tensor
    labels_BL: Tensor
    targets: Tensor  # how many labels count, over all ranks; 0-dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Outcome of one optimizer step; seconds are this rank's own."""

    loss: float
    grad_norm: float  # global, before clipping
    forward_seconds: float
    step_seconds: float


class TrainTask:
    """Model, optimizer and data of one trial on this rank. Raises ValueError when the settings do not fit together."""

    def __init__(
        self,
        settings: TrialSettings,
        method: NativeMethod,
        world: World,
        *,
        sequences: Sequences | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        """`sequences` are what is learnt from, by default those of the settings' data in order; `recipe` is how."""
        refusal = vocabulary_refusal(settings)
        if refusal:
            raise ValueError(refusal)
        self.settings, self.world, self.recipe = settings, world, recipe or Recipe()
        self.store: Sequences = sequences or open_tokens(settings.data)
        self.cp: ContextParallel = context_parallel(settings, method, world)
        self.attend = RefusingAttention(method.attention(self.cp, settings))
        self.model: Decoder = build_model(settings, self.attend, world.fsdp_mesh)
        self.optimizer = _adamw(self.model, settings.learning_rate, self.recipe)
        self.positions_L = self.cp.positions(settings.seq_len, device=world.device)
        self._clock = StepClock(world.device)

    def run(self, on_progress: OnProgress) -> Measurement:
        """Warm up, then measure. Raises FloatingPointError when the loss stops being a number."""
        plan = self.settings.steps
        steps: list[Step] = []
        for index in range(plan.warmup + plan.measured):
            if index == plan.warmup:
                reset_peaks(self.world.device)
            self.cp.traffic.reset()
            steps.append(self.step(index))
            on_progress(
                {
                    "step": index + 1,
                    "of": plan.warmup + plan.measured,
                    "loss": steps[-1].loss,
                    "seconds": steps[-1].step_seconds,
                }
            )
        timed = steps[plan.warmup :]
        return measured(
            self.world,
            self.cp,
            step_seconds=self.world.slowest([step.step_seconds for step in timed]),
            forward_seconds=self.world.slowest([step.forward_seconds for step in timed]),
            loss=[step.loss for step in steps],
            grad_norm=[step.grad_norm for step in steps],
            chosen=self.attend.chosen(),
            data=self.store.describe(),
        )

    def step(self, index: int) -> Step:
        """One optimizer step on the batch of that index. Collective."""
        self._clock.start()
        loss = self.forward(self.batch(index))
        self._clock.mark()
        loss.backward()
        norm = clip_gradients(self.model, self.recipe.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        forward_seconds, step_seconds = self._clock.stop()

        total = loss.detach()
        dist.all_reduce(total)
        outcome = Step(
            loss=total.item(), grad_norm=norm.item(), forward_seconds=forward_seconds, step_seconds=step_seconds
        )
        if not (math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm)):
            raise FloatingPointError(
                f"step {index + 1} has loss {outcome.loss} and gradient norm {outcome.grad_norm}; try a learning_rate "
                f"below {self.settings.learning_rate}"
            )
        return outcome

    def forward(self, batch: Batch) -> Tensor:
        """This rank's share of the mean loss: the shares of all ranks add up to it. 0 where no label counts."""
        loss_sum = self.model(batch.tokens_BL, self.positions_L, batch.labels_BL)
        return loss_sum / batch.targets.clamp(min=1)

    def batch(self, index: int) -> Batch:
        """This rank's tokens of step `index`, with the labels their global neighbours give them. Collective."""
        settings, device = self.settings, self.world.device
        tokens_BS, labels_BS = self.store.batch(
            index, self.world.replica, settings.dp_size, settings.batch_size, settings.seq_len
        )
        labels_BL = self.cp.shard(labels_BS, dim=1).to(device)
        targets = (labels_BL != IGNORE).sum()
        dist.all_reduce(targets)
        return Batch(tokens_BL=self.cp.shard(tokens_BS, dim=1).to(device), labels_BL=labels_BL, targets=targets)


def clip_gradients(model: Decoder, max_norm: float = 1.0) -> Tensor:
    """Scale all gradients down to a global norm of `max_norm`; returns the norm before that, 0-dim. Collective."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _adamw(model: Decoder, learning_rate: float, recipe: Recipe) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(recipe.beta1, recipe.beta2),
        eps=recipe.epsilon,
        fused=True,
    )
