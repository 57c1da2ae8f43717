"""Shape and dtype of a tensor that does not exist yet: what a rank expects to receive."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor to be received."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return math.prod(self.shape) * self.dtype.itemsize


def tensor_specs(tensors: tuple[Tensor, ...]) -> tuple[TensorSpec, ...]:
    """What a peer that holds the same shapes will send."""
    return tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
