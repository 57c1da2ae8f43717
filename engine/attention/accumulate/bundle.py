"""Several tensors for every rank of a group as one message of bytes, whatever their dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.accumulate.tensor_spec import TensorSpec


def bundle(tensor_specs: tuple[TensorSpec, ...], ranks: int, device: torch.device) -> Tensor:
    """Memory for tensors like `tensor_specs` from or to each rank: uint8 [ranks, bytes], values undefined.

    A row is as long as its tensors, but for what the widest dtype needs to be aligned in the next one.
    """
    widest = max(like.dtype.itemsize for like in tensor_specs)
    row_bytes = -(-sum(like.nbytes for like in tensor_specs) // widest) * widest
    return torch.empty(ranks, row_bytes, dtype=torch.uint8, device=device)


def sections(rows: Tensor, tensor_specs: tuple[TensorSpec, ...]) -> tuple[Tensor, ...]:
    """The tensors that lie in a bundle, in the order of `tensor_specs`: views of it, each [ranks, *shape].

    The widest dtype lies first: behind it all others are aligned without a gap.
    """
    views, start = {}, 0
    for index in sorted(range(len(tensor_specs)), key=lambda index: -tensor_specs[index].dtype.itemsize):
        like = tensor_specs[index]
        own = rows[:, start : start + like.nbytes].view(like.dtype)
        views[index] = own.unflatten(1, like.shape)
        start += like.nbytes
    return tuple(views[index] for index in range(len(tensor_specs)))
