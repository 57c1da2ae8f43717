"""Stands for apex.normalization.fused_layer_norm: the norms that Megatron-DeepSpeed and InternEvo take, by torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm


class FusedLayerNormAffineFunction:
    """Only `apply`, which torch differentiates by itself."""

    @staticmethod
    def forward(*_: Any) -> Tensor:
        raise NotImplementedError("call apply")

    @staticmethod
    def apply(hidden: Tensor, weight: Tensor, bias: Tensor, shape: Sequence[int], eps: float, *_: Any) -> Tensor:
        return layer_norm(hidden, list(shape), weight, bias, eps)


def mixed_dtype_fused_rms_norm_affine(
    hidden: Tensor, weight: Tensor, normalized_shape: Sequence[int], eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """In the dtype of `weight`, as apex's mixed functions."""
    return rms_norm(hidden.to(weight.dtype), list(normalized_shape), weight, eps)


class MixedFusedRMSNorm(torch.nn.Module):
    """Root mean square norm over the last dimension."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        sizes = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape, self.eps = sizes, eps
        self.weight = torch.nn.Parameter(torch.ones(*sizes))

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return mixed_dtype_fused_rms_norm_affine(hidden, self.weight, self.normalized_shape, self.eps)
