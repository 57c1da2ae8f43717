"""The mixers of linear layers: projections, short convolution, recurrence, gated norm, output matrix.

What they compute on consecutive tokens is that of one device; `LinearShard` knows of documents and ranks.
Sources: Gated DeltaNet, arXiv:2412.06464, as in Qwen3-Next; Mamba-2, arXiv:2405.21060, with its names in brackets.

Shape letters: B batch, L tokens, E embedding, H key heads, V value heads, N key dim, P value dim, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.linear.kernels import gated_norm
from engine.linear.shard import LinearShard
from engine.models.matrices import Linear
from engine.ops.autograd import accumulation_dtype
from engine.ops.copies import computed
from engine.ops.norm import RMSNorm
from engine.ops.products import linear
from engine.shape import ModelShape


class ShortConvolution(nn.Module):
    """Weights of one convolution of every channel and its SiLU; the last tap is that of the token itself."""

    def __init__(self, channels: int, taps: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x_BLC: Tensor, shard: LinearShard) -> Tensor:
        bias_C = None if self.bias is None else computed(self.bias)
        return shard.convolved(x_BLC, computed(self.weight), bias_C)


class LinearMixer(nn.Module):
    """What both kinds share: a head's decay at a token is exp(-exp(decay_log) softplus(decay + decay_bias))."""

    matrices: tuple[str, ...]  # the order of matrices, and of the convolution's channels, is that of files
    channels: tuple[str, str, str]
    decay: Linear
    gate: Linear

    def __init__(self, shape: ModelShape, norm: nn.Module, *, bias: bool) -> None:
        """`norm` of the outputs; `bias` of the convolution."""
        super().__init__()
        self.heads, self.key_dim, self.value_dim = shape.linear_heads, shape.linear_key_dim, shape.linear_value_dim
        keys, values = shape.linear_key_heads * self.key_dim, self.heads * self.value_dim
        self.step_min = shape.linear_step_min
        self.decay_log, self.decay_bias = (nn.Parameter(torch.empty(self.heads)) for _ in range(2))
        rows = {"q": keys, "k": keys, "v": values, "gate": values, "beta": self.heads, "decay": self.heads}
        for name in self.matrices:
            self.add_module(name, Linear(shape.hidden, rows[name]))
        self.conv = ShortConvolution(2 * keys + values, shape.linear_conv, bias)
        self.norm = norm
        self.output = Linear(values, shape.hidden)

    def qkv(self, x_BLE: Tensor, shard: LinearShard) -> dict[str, Tensor]:
        """Queries, keys [B, L, H, N] and values [B, L, V, P], convolved."""
        parts = {name: self.get_submodule(name) for name in self.channels}
        joined_BLC = linear(x_BLE, [part.weight for part in parts.values()])
        convolved = self.conv(joined_BLC, shard).split([part.out_features for part in parts.values()], -1)
        dims = {"q": self.key_dim, "k": self.key_dim, "v": self.value_dim}
        return {name: part.unflatten(-1, (-1, dims[name])) for name, part in zip(parts, convolved, strict=True)}

    def step(self, x_BLE: Tensor) -> tuple[Tensor, Tensor]:
        """softplus(decay + decay_bias) [the time step], not below its least value, and it times -exp(decay_log): the
        logarithm of the decay, both [B, L, V] in the accumulation dtype."""
        dtype = accumulation_dtype(x_BLE.dtype)
        step_BLV = F.softplus(self.decay(x_BLE).to(dtype) + computed(self.decay_bias))
        if self.step_min:
            step_BLV = step_BLV.clamp(min=self.step_min)
        return step_BLV, -computed(self.decay_log).to(dtype).exp() * step_BLV


class GatedDeltaNet(LinearMixer):
    """Keys and queries of unit length, the gated delta rule, a norm of every head's output, then the gate."""

    matrices = ("q", "k", "v", "gate", "beta", "decay")
    channels = ("q", "k", "v")
    beta: Linear
    norm: RMSNorm

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape, RMSNorm(shape.linear_value_dim, eps=shape.norm_eps), bias=False)

    def forward(self, x_BLE: Tensor, shard: LinearShard) -> Tensor:
        """The residual branch [B, L, E] of normed hidden states. Collective where ranks share the sequence."""
        parts, (_, decay_BLV) = self.qkv(x_BLE, shard), self.step(x_BLE)
        q, k, v = parts["q"], parts["k"], parts["v"]
        out_BLVP = shard.recurrence(q, k, v, decay_BLV, self.beta(x_BLE).sigmoid())
        gate_BLVP = self.gate(x_BLE).unflatten(-1, (self.heads, self.value_dim))
        branch_BLE: Tensor = self.output(gated_norm(self.norm, out_BLVP, gate_BLVP).flatten(-2))
        return branch_BLE


class Mamba2(LinearMixer):
    """Queries [C], keys [B] and values [x]; values also pass around the recurrence (`skip` [D]); the gate, then a norm
    of every group's outputs."""

    matrices = ("gate", "v", "k", "q", "decay")
    channels = ("v", "k", "q")

    def __init__(self, shape: ModelShape) -> None:
        values = shape.linear_heads * shape.linear_value_dim
        super().__init__(shape, GroupNorm(values, shape.linear_key_heads, shape.norm_eps), bias=True)
        self.skip = nn.Parameter(torch.empty(self.heads))

    def forward(self, x_BLE: Tensor, shard: LinearShard) -> Tensor:
        """As `GatedDeltaNet.forward`."""
        parts, (step_BLV, decay_BLV) = self.qkv(x_BLE, shard), self.step(x_BLE)
        v_BLVP = parts["v"]
        written_BLVP = v_BLVP * step_BLV[..., None].to(v_BLVP.dtype)
        out_BLVP = shard.recurrence(parts["q"], parts["k"], written_BLVP, decay_BLV)
        out_BLVP = out_BLVP + v_BLVP * computed(self.skip)[:, None]
        branch_BLE: Tensor = self.output(self.norm(out_BLVP.flatten(-2) * F.silu(self.gate(x_BLE))))
        return branch_BLE


class GroupNorm(nn.Module):
    """RMS norm of each of several equal groups of features, with one weight for each feature."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x_BLF: Tensor) -> Tensor:
        grouped = x_BLF.unflatten(-1, (self.groups, -1))
        return F.rms_norm(grouped, grouped.shape[-1:], None, self.eps).flatten(-2) * computed(self.weight)


MIXERS: dict[str, type[GatedDeltaNet] | type[Mamba2]] = {"gated_delta_net": GatedDeltaNet, "mamba2": Mamba2}


def mixer_of(shape: ModelShape) -> GatedDeltaNet | Mamba2:
    """The mixer of a linear layer of this shape."""
    return MIXERS[shape.linear](shape)
