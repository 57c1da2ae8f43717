"""One training step captured as CUDA graphs, and replayed with each step's tokens and learning rate."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.cuda.graph import CapturedParts
from engine.data.batch import Batch, page_locked
from engine.lm_head.tiles import check_labels
from engine.optimizer import OnePassAdamW

Work = Generator[None, None, tuple[Tensor, Tensor]]  # ends with the loss and the gradients' norm, both 0-dim


class CapturedStep:
    """A step whose tokens, labels, number of targets and learning rates are read from memory that stays where it is.

    Args:
        work: the whole step of some micro-batches: forward, backward, update. It has run on `stream` before.
        like: micro-batches of a step; all later ones have their shapes and positions.
        optimizer: the one that `work` calls.
        vocabulary: words that a label may name.
        stream: that captures.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Batch]], Work],
        like: Sequence[Batch],
        optimizer: OnePassAdamW,
        vocabulary: int,
        stream: torch.cuda.Stream,
    ) -> None:
        self._optimizer, self._vocabulary = optimizer, vocabulary
        device = like[0].tokens_BL.device
        targets = like[0].targets.clone()  # of the whole step
        self._batches = [
            replace(
                batch,
                tokens_BL=batch.tokens_BL.clone(),
                # Every label counts in the capture: a run of tokens without one would be left out of the graph.
                labels_BL=page_locked(torch.zeros_like(batch.labels_BL), device),
                targets=targets,
            )
            for batch in like
        ]
        self._rates = [torch.zeros((), dtype=torch.float32, device=device) for _ in optimizer.param_groups]
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what the steps before used: the graphs have memory of their own
        torch.cuda.reset_peak_memory_stats(device)
        optimizer.device_rates = self._rates
        try:
            self._parts = CapturedParts(work(self._batches), stream)
        finally:
            optimizer.device_rates = None
        self.allocated_bytes = torch.cuda.max_memory_allocated(device)  # peak of a step, which no replay shows

    def run(self, batches: Sequence[Batch]) -> Work:
        """One step on these tokens, with the stops and the result of `work`. The step before it has ended.

        Raises ValueError for a label that is neither a word nor -100.
        """
        for kept, batch in zip(self._batches, batches, strict=True):
            check_labels(batch.labels_BL.flatten(), self._vocabulary)
            kept.labels_BL.copy_(batch.labels_BL)
            kept.tokens_BL.copy_(batch.tokens_BL)
        self._batches[0].targets.copy_(batches[0].targets)
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        return (yield from self._parts.replay())
