"""Steps of systems whose ranks hold parts of a sum: their losses, and their gradients, are added up over the ranks.

For target files whose system leaves that to its trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conform.target import CaseProblem, Part

LabelCount: TypeAlias = int | Tensor
# The loss of a rank's part: the sum over its labels, divided by the number of labels of the whole step.
LossOf: TypeAlias = Callable[[nn.Module, Part, LabelCount], Tensor]
LABELS = "num_items_in_batch"  # entry of a part: the number of labels of its whole batch, by the name in transformers


def step_of(loss_of: LossOf, model: nn.Module, parts: Sequence[Part], problem: CaseProblem) -> Tensor:
    """Forward and backward of all micro-batches; the loss of the whole step. Parts have an entry LABELS. Collective."""
    model.zero_grad()
    labels = sum(part[LABELS] for part in parts)
    total = torch.zeros((), dtype=torch.float64, device=problem.device)
    for part in parts:
        loss = loss_of(model, part, labels)
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total, group=problem.group)
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=problem.group)
    return total


@torch.no_grad()
def evaluation_of(loss_of: LossOf, model: nn.Module, part: Part, problem: CaseProblem) -> Tensor:
    """The loss of the whole batch, without gradients. Collective."""
    model.eval()
    loss = loss_of(model, part, part[LABELS]).double()
    model.train()
    dist.all_reduce(loss, group=problem.group)
    return loss
