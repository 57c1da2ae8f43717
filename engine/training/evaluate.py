"""The loss on held-out text: the mean over all its target tokens, over all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from engine.data.sequences import Span
from engine.data.store import TokenStore
from engine.lm_head.choose import loss_sum_of
from engine.lm_head.plain import IGNORE
from engine.tasks.train import TrainTask


class Evaluator:
    """Always the same sequences: the first ones of the held-out span."""

    def __init__(self, task: TrainTask, store: TokenStore, span: Span, sequences: int) -> None:
        """The span holds at least that many `sequences`: `training_data` raises for a run where it does not."""
        assert span.sequences(task.settings.seq_len) >= sequences, (span, sequences)
        self._task, self._store, self._span, self._sequences = task, store, span, sequences
        # Training may add a z-loss; evaluation is the cross-entropy alone.
        self._loss_sum = loss_sum_of(replace(task.settings, z_loss=0.0), task.world.device.type)

    def loss(self) -> float:
        """Mean loss per target token. Collective."""
        task = self._task
        total = torch.zeros(2, dtype=torch.float64, device=task.world.device)  # sum of the losses, target tokens
        positions_L = task.cp.positions(task.settings.seq_len, device=task.world.device)
        with torch.no_grad(), self._evaluation_loss():
            for tokens_BS, labels_BS in self._rounds():
                labels_BL = task.cp.shard(labels_BS, dim=1).to(task.world.device)
                tokens_BL = task.cp.shard(tokens_BS, dim=1).to(task.world.device)
                total[0] += task.model(tokens_BL, positions_L, labels_BL).double()
                total[1] += (labels_BL != IGNORE).sum()
        dist.all_reduce(total)
        loss_sum, targets = total.tolist()
        return float(loss_sum / targets)

    @contextlib.contextmanager
    def _evaluation_loss(self) -> Iterator[None]:
        """The model with the loss of evaluation."""
        head = self._task.model.head
        training_loss, head.loss_sum = head.loss_sum, self._loss_sum
        try:
            yield
        finally:
            head.loss_sum = training_loss

    def _rounds(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of this replica. All replicas take part in all rounds, because their ranks hold each other's
        parameters: a replica without sequences left computes one that does not count."""
        settings = self._task.settings
        per_round = settings.batch_size * settings.dp_size
        for first in range(0, self._sequences, per_round):
            mine = first + self._task.world.replica * settings.batch_size
            rows = [self._row(number) for number in range(mine, mine + settings.batch_size)]
            tokens, labels = (torch.stack(part) for part in zip(*rows, strict=True))
            yield tokens, labels

    def _row(self, number: int) -> tuple[Tensor, Tensor]:
        seq_len = self._task.settings.seq_len
        counts = number < self._sequences
        start = self._span.start + (number if counts else 0) * seq_len
        tokens_S = self._store.window(start, seq_len + 1)
        labels_S = tokens_S[1:] if counts else torch.full_like(tokens_S[1:], IGNORE)
        return tokens_S[:-1], labels_S
