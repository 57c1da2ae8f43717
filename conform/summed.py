"""Steps of systems whose ranks hold parts of a sum: their losses, and their gradients, are added up over the ranks.

For target files whose system leaves that to its trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conform.target import CaseProblem, Part

LossOf = Callable[[nn.Module, Part, int], Tensor]  # of a rank's part, divided by the number of labels of the whole step


def step_of(loss_of: LossOf, model: nn.Module, parts: Sequence[Part], problem: CaseProblem) -> Tensor:
    """Forward and backward of all micro-batches; the loss of the whole step. A part's `valid` is the number of labels
    of its whole batch. Collective."""
    model.zero_grad()
    valid, total = sum(part["valid"] for part in parts), torch.zeros((), dtype=torch.float64)
    for part in parts:
        loss = loss_of(model, part, valid)
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
    loss = loss_of(model, part, part["valid"]).double()
    model.train()
    dist.all_reduce(loss, group=problem.group)
    return loss
