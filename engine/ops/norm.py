"""RMSNorm of any number of tokens.

torch's fused CUDA kernels find a row at block index x row length, in torch 2.11 in 32 bits (pytorch issue 181555):
rows that begin 2^32 elements or more into a tensor are wrong, without an error. 1M tokens on one rank times an
embedding of 4096 reach that. A tensor that large is normalised in runs of tokens, with one more copy of it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.ops.copies import computed

MAX_ELEMENTS = 1 << 31  # in one call of the kernel; half of what it can address


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        weight_E = computed(self.weight)
        if x.numel() <= MAX_ELEMENTS:
            return F.rms_norm(x, self.normalized_shape, weight_E, self.eps)
        runs = x.flatten(0, -2).split(MAX_ELEMENTS // x.shape[-1])
        return torch.cat([F.rms_norm(run, self.normalized_shape, weight_E, self.eps) for run in runs]).view_as(x)
