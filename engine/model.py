"""A Llama-style decoder, written for one device. Nothing here knows of ranks.

Parallelism is set from outside (`engine.parallelize`) through five attributes, each a plain callable: `Block.attend`
(attention over the whole sequence), `Block.activations` (which tensors are saved for backward), `Block.project` and
`Block.add_mlp` (how many tokens the projections before attention, and the MLP, compute at once) and `Head.loss_sum` (LM
head and loss). With the defaults the model is complete on one device, and the reference of the parallel one.

Shape letters: B batch, L tokens held here, N query heads, K KV heads, D head dim, E embedding, F MLP width,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from engine.attention.masks import Causal, Mask
from engine.attention.reference import dense_attention
from engine.lm_head.plain import LossSum, plain_loss_sum
from engine.ops.autograd import accumulation_dtype
from engine.ops.copies import computed, linear
from engine.ops.norm import RMSNorm
from engine.ops.ranges import LM_HEAD
from engine.ops.rotary import rotate
from engine.ops.swiglu import swiglu
from engine.settings import ModelShape

if TYPE_CHECKING:
    from engine.attention.algorithms.saved import SavedOutput

AttendCall = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # (q_BLND, k_BLKD, v_BLKD) -> (out_BLND, lse)
Rotary = tuple[Tensor, Tensor]  # cos_LD, sin_LD over half of the head dim
LayerFn = Callable[[Tensor, Rotary, AttendCall], Tensor]  # x_BLE -> x_BLE
Activations = Callable[[LayerFn, Tensor, Rotary, "Attend"], Tensor]  # runs a layer, decides which tensors are saved
Projected = tuple[Tensor, Tensor, Tensor, Tensor]  # q_BLND, k_BLKD, v_BLKD, and x_BLE for the residual stream
Project = Callable[[nn.RMSNorm, "Attention", Tensor, Rotary], Projected]  # of norm(x)


class AddMLP(Protocol):
    """The MLP's residual branch: y + mlp(norm(y)), where y is x, or x + branch."""

    def __call__(self, norm: nn.RMSNorm, mlp: MLP, x_BLE: Tensor, branch_BLE: Tensor | None = None) -> Tensor: ...


class Attend(Protocol):
    """Attention over the whole sequence, and the part of its result to save. See `engine.method.AttentionFn`."""

    def __call__(
        self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, saved: SavedOutput | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def keep(self, out_BLND: Tensor, lse_BNL: Tensor, tail: float) -> SavedOutput | None: ...


def rotary_angles(positions_L: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> Rotary:
    """Cosine and sine of every position's RoPE angles (arXiv:2104.09864), each [L, head_dim / 2] in `dtype`.

    The angles are formed in float64: positions in the millions times a rounded frequency leave fp32 off by up to
    0.06 rad at 1M tokens.
    """
    exponents_D = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_L.device) / head_dim
    angles_LD = torch.outer(positions_L.double(), base**-exponents_D)
    return angles_LD.cos().to(dtype), angles_LD.sin().to(dtype)


class Linear(nn.Linear):
    """A matrix that may have a copy in the dtype of the computation (`engine.ops.copies`); no bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, [self.weight])


class Embedding(nn.Embedding):
    """Likewise."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, computed(self.weight))


class Attention(nn.Module):
    """The projections around attention; attention itself is called by the block, between `project` and `output`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q = Linear(shape.hidden, shape.heads * shape.head_dim)
        self.k = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.output = Linear(shape.heads * shape.head_dim, shape.hidden)
        # One weight for all query heads and one for all key heads, as in Qwen3 (arXiv:2505.09388).
        self.q_norm = RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, eps=shape.norm_eps) if shape.qk_norm else None

    def project(self, x_BLE: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """q_BLND, k_BLKD and v_BLKD of these tokens, q and k normalised where the shape says so, then rotated."""
        matrices = [self.q.weight, self.k.weight, self.v.weight]
        parts = linear(x_BLE, matrices).split([matrix.shape[0] for matrix in matrices], -1)
        q_BLND, k_BLKD, v_BLKD = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        v_BLKD = v_BLKD.contiguous()  # a view would keep q and k as they were before their rotation
        if self.q_norm is not None and self.k_norm is not None:
            q_BLND, k_BLKD = self.q_norm(q_BLND), self.k_norm(k_BLKD)
        return rotate(q_BLND, rotary), rotate(k_BLKD, rotary), v_BLKD


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202) where the shape is gated, GELU where it is not."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = Linear(shape.hidden, shape.ffn) if shape.gated else None
        self.up = Linear(shape.hidden, shape.ffn)
        self.down = Linear(shape.ffn, shape.hidden)

    def forward(self, x_BLE: Tensor) -> Tensor:
        return self.down(activate(self.up(x_BLE), None if self.gate is None else self.gate(x_BLE)))


def activate(up_BLF: Tensor, gate_BLF: Tensor | None = None) -> Tensor:
    """Input of the MLP's last matrix: GELU of `up`, or `up` times the SiLU of `gate`."""
    return F.gelu(up_BLF) if gate_BLF is None else swiglu(gate_BLF, up_BLF)


class DenseAttention:
    """The default attention: dense, one device, causal or under another mask. Autograd saves the intermediates, so a
    recomputation ignores `saved` and computes everything."""

    def __init__(self, mask: Mask | None = None) -> None:
        self._mask = mask or Causal()

    def __call__(
        self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, saved: SavedOutput | None = None
    ) -> tuple[Tensor, Tensor]:
        return dense_attention(q_BLND, k_BLKD, v_BLKD, self._mask)

    def keep(self, out_BLND: Tensor, lse_BNL: Tensor, tail: float) -> None:
        return None


def project_whole(norm: nn.RMSNorm, attention: Attention, x_BLE: Tensor, rotary: Rotary) -> Projected:
    """The default beginning of a layer: queries, keys and values of all tokens at once."""
    return *attention.project(norm(x_BLE), rotary), x_BLE


def add_whole_mlp(norm: nn.RMSNorm, mlp: MLP, x_BLE: Tensor, branch_BLE: Tensor | None = None) -> Tensor:
    """The default second half of a layer, the MLP's residual branch: all tokens at once."""
    x_BLE = x_BLE if branch_BLE is None else x_BLE + branch_BLE
    return x_BLE + mlp(norm(x_BLE))


def keep_all(layer: LayerFn, x_BLE: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
    """The default activations: autograd saves everything."""
    return layer(x_BLE, rotary, attend)


class Block(nn.Module):
    """One decoder layer."""

    attend: Attend
    activations: Activations
    project: Project
    add_mlp: AddMLP
    joins_sum: bool  # whether `add_mlp` forms the sum of the residual stream before it, in one pass with its norm

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = MLP(shape)
        self.attend = DenseAttention()
        self.activations = keep_all
        self.project = project_whole
        self.add_mlp = add_whole_mlp
        self.joins_sum = False

    def forward(self, x_BLE: Tensor, rotary: Rotary) -> Tensor:
        return self.activations(self.layer, x_BLE, rotary, self.attend)

    def layer(self, x_BLE: Tensor, rotary: Rotary, attend: AttendCall) -> Tensor:
        """The layer's mathematics. Pure but for `attend`, so it may be run again to recompute activations."""
        *qkv, x_BLE = self.project(self.attention_norm, self.attention, x_BLE, rotary)
        out_BLND, _lse = attend(*qkv)
        del qkv
        if self.joins_sum:
            return self.add_mlp(self.mlp_norm, self.mlp, x_BLE, self.attention.output(out_BLND.flatten(-2)))
        x_BLE = x_BLE + self.attention.output(out_BLND.flatten(-2))
        return self.add_mlp(self.mlp_norm, self.mlp, x_BLE)


class Head(nn.Module):
    """LM head and loss in one module, so that the logits of a long sequence need never exist."""

    loss_sum: LossSum

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocab, shape.hidden))
        self.loss_sum = plain_loss_sum

    def forward(self, x_BLE: Tensor, labels_BL: Tensor | None) -> Tensor:
        if labels_BL is None:
            return linear(x_BLE, [self.weight])
        with record_function(LM_HEAD):
            return self.loss_sum(x_BLE.flatten(0, 1), computed(self.weight), labels_BL.flatten())


class Decoder(nn.Module):
    """Embedding, blocks, final norm, untied LM head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.head = Head(shape)

    def forward(self, tokens_BL: Tensor, positions_L: Tensor, labels_BL: Tensor | None = None) -> Tensor:
        """Sum of the tokens' losses in fp32 or wider; without labels, the logits [B, L, V].

        Args:
            tokens_BL: token ids held here.
            positions_L: their positions in the whole sequence, for RoPE.
            labels_BL: the token to predict after each; -100 where there is none.
        """
        x_BLE = self.embedding(tokens_BL)
        dtype = accumulation_dtype(x_BLE.dtype)
        rotary = rotary_angles(positions_L, self.shape.head_dim, self.shape.rope_base, dtype)
        for block in self.blocks:
            x_BLE = block(x_BLE, rotary)
        return self.head(self.norm(x_BLE), labels_BL)
