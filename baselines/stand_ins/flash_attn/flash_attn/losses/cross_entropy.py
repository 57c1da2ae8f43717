"""Stands for flash_attn.losses.cross_entropy.CrossEntropyLoss on one rank: torch's cross entropy of fp32 logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CrossEntropyLoss(torch.nn.Module):
    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        process_group: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if process_group is not None and torch.distributed.get_world_size(process_group) > 1:
            raise NotImplementedError("the stand-in for flash_attn's loss splits no vocabulary; install flash-attn 2")
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """`logits` [tokens, vocabulary], `labels` [tokens]."""
        return torch.nn.functional.cross_entropy(
            logits.float(),
            labels,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
