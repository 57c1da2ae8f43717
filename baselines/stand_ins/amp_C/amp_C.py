"""Stands for apex's extension amp_C: scaled copies and norms of lists of tensors, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def multi_tensor_scale(_: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], scale: float) -> None:
    """The tensors of the first list times `scale`, into those of the second; `overflow` becomes 1 where one is not
    finite."""
    for source, into in zip(*lists, strict=True):
        into.copy_(source * scale)
        if not bool(torch.isfinite(into).all()):
            overflow.fill_(1)


def multi_tensor_l2norm(
    _: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """The norm of all tensors of the first list, and those of each, or zeros."""
    norms = torch.stack([each.float().norm() for each in lists[0]]) if lists[0] else overflow.new_zeros(1).float()
    return norms.norm()[None], norms if per_tensor else norms.new_zeros(1)
