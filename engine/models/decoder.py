"""The decoder of every architecture, put together from the features of its shape and written for one device.

Parallelism is set from outside (`engine.parallelize`) through seven attributes, each a plain callable: `Block.attend`
(attention over the whole sequence), `Block.mix` (a linear layer's mixer over the whole sequence), `Block.activations`
(which tensors are saved for backward), `Block.project` and `Block.add_mlp` (how many tokens the projections before
attention, and the MLP, compute at once), `Block.attend_groups` (how many heads attention differentiates at once; None:
all) and `Head.loss_sum` (LM head and loss). With the defaults the model is complete
on one device, and the reference of the parallel one. Nothing here knows of ranks or names an architecture.

Shape letters: B batch, L tokens held here, N query heads, K KV heads, D head dim, E embedding, F MLP width,
V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from engine.attention.algorithms.latent import Expansion
from engine.attention.masks import Causal, Mask, parse_mask
from engine.attention.reference import dense_attention
from engine.linear.shard import LinearShard, Mix, Mixer
from engine.lm_head.loss import LossSum, plain_loss_sum
from engine.lora import MODULES, Lora, adapters_unsupported_reason
from engine.models.linear import mixer_of
from engine.models.matrices import Embedding, Linear, Norm, normed
from engine.ops import LM_HEAD
from engine.ops.autograd import accumulation_dtype
from engine.ops.copies import computed
from engine.ops.elementwise import rotate, swiglu
from engine.ops.norm import RMSNorm
from engine.ops.products import linear
from engine.rope import rotary_tables
from engine.shape import ModelShape

if TYPE_CHECKING:
    from engine.attention.algorithms.saved import Attend, OnceAndAgain, SavedOutput

Rotary = tuple[Tensor, Tensor]  # cos_LD, sin_LD over half of the head dim
LayerFn = Callable[[Tensor, Rotary, "AttendCall | MixCall"], Tensor]  # x_BLE -> x_BLE
# Runs a layer, and decides which tensors are saved.
Activations = Callable[[LayerFn, Tensor, Rotary, "Attend | MixCall"], Tensor]
# q_BLND, k_BLKD, v_BLKD, where attention has a gate its input [B, L, N x D], and x_BLE for the residual stream.
Projected = tuple[Tensor, ...]
Project = Callable[[Norm, "Attention", Tensor, Rotary], Projected]  # of norm(x)


class AttendGroups(Protocol):
    """Of a layer that is computed again, in place of `Project` and attention: (out_BLND, x_BLE for the residual
    stream)."""

    def __call__(
        self, norm: Norm, attention: Attention, x_BLE: Tensor, rotary: Rotary, again: OnceAndAgain
    ) -> tuple[Tensor, Tensor]: ...


class AddMLP(Protocol):
    """The residual stream after the MLP: y + mlp(norm(y)), where y is x, or x + branch."""

    def __call__(self, norm: Norm, mlp: MLP, x_BLE: Tensor, branch_BLE: Tensor | None = None) -> Tensor: ...


class AttendCall(Protocol):
    """Attention over the whole sequence: (out_BLND, lse_BNL). `sinks_N` is given where the shape has sinks,
    `expand_NXC` where it has a latent."""

    def __call__(
        self,
        q_BLND: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        *,
        sinks_N: Tensor | None = None,
        expand_NXC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class MixCall(Protocol):
    """The residual branch of a linear layer's mixer over the whole sequence, from this rank's consecutive tokens.

    The residual stream is moved to them before the first of several linear layers, and back after the last.
    """

    def enter(self, x_BLE: Tensor) -> Tensor: ...

    def __call__(self, mixer: Mixer, x_BLE: Tensor) -> Tensor: ...

    def leave(self, x_BLE: Tensor) -> Tensor: ...


def rotary_of(shape: ModelShape, windowed: bool, positions_L: Tensor, dtype: torch.dtype, seq_len: int) -> Rotary:
    """The tables of the layers with the window, or of those without; `seq_len` is of the whole sequence. Without RoPE
    they have no columns.

    Queries and keys are both turned by them, so a factor of the scores is in them as its square root.
    """
    if not shape.rope:
        return (torch.empty(len(positions_L), 0, dtype=dtype, device=positions_L.device),) * 2
    base, scaling = shape.rope_base, shape.rope_scaling
    if windowed and shape.rope_base_window:
        base, scaling = shape.rope_base_window, "none"
    tables = rotary_tables(positions_L, shape.rotated_dim, base, dtype, scaling, seq_len)
    if not shape.attention_scale:
        return tables
    factor = math.sqrt(shape.attention_scale * math.sqrt(shape.head_dim))
    return tables[0] * factor, tables[1] * factor


class Attention(nn.Module):
    """The projections around attention; attention itself is called by the block, between `project` and `forward`."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.plain = shape.plain_projection
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = Linear(shape.hidden, queries, shape.qkv_bias)
        self.k = Linear(shape.hidden, keys, shape.qkv_bias)
        self.v = Linear(shape.hidden, keys, shape.qkv_bias)
        self.gate = Linear(shape.hidden, queries, shape.qkv_bias) if shape.attention_gate else None
        self.output = Linear(queries, shape.hidden, shape.output_bias)
        self.sinks = nn.Parameter(torch.empty(shape.heads)) if shape.sinks else None
        # One weight for all query heads and one for all key heads, or one norm over all heads at once.
        self.norms_heads = not shape.qk_norm_whole
        widths = (shape.head_dim, shape.head_dim) if self.norms_heads else (queries, keys)
        self.q_norm, self.k_norm = (RMSNorm(width, eps=shape.norm_eps) if shape.qk_norm else None for width in widths)
        self.post_norm = None if shape.norms == "before" else RMSNorm(shape.hidden, eps=shape.norm_eps)

    def forward(self, out_BLND: Tensor, gate_BLF: Tensor | None = None) -> Tensor:
        """The residual branch [B, L, E] of attention's output, which a gate multiplies where there is one."""
        out_BLF = out_BLND.flatten(-2)
        return normed(self.post_norm, self.output(out_BLF if gate_BLF is None else out_BLF * gate_BLF.sigmoid()))

    def projections(self) -> tuple[nn.Module | None, ...]:
        """The modules whose parameters `project` reads."""
        return self.q, self.k, self.v, self.gate, self.q_norm, self.k_norm

    def given(self) -> dict[str, Tensor]:
        """Parameters that attention itself is called with."""
        return {} if self.sinks is None else {"sinks_N": computed(self.sinks)}

    def project(self, x_BLE: Tensor, rotary: Rotary) -> tuple[Tensor, ...]:
        """q_BLND, k_BLKD and v_BLKD of these tokens, q and k normalised where the shape says so, then rotated; and the
        gate's input where there is one."""
        parts = (self.q, self.k, self.v)
        if self.q.weight.requires_grad:
            biases = [part.bias for part in parts if part.bias is not None]
            joined = linear(x_BLE, [part.weight for part in parts], biases, self.q.products)
            q_BLF, k_BLF, v_BLF = joined.split([part.out_features for part in parts], -1)
        else:  # frozen matrices have no copies that follow one another: joining them would copy and save them
            q_BLF, k_BLF, v_BLF = (part(x_BLE) for part in parts)
        v_BLKD = self._in_heads(v_BLF).contiguous()  # a view would keep q and k as they were before their rotation
        gate = () if self.gate is None else (self.gate(x_BLE),)
        return self._turned(q_BLF, self.q_norm, rotary), self._turned(k_BLF, self.k_norm, rotary), v_BLKD, *gate

    def _in_heads(self, x_BLF: Tensor) -> Tensor:
        return x_BLF.unflatten(-1, (-1, self.head_dim))

    def _turned(self, x_BLF: Tensor, norm: Norm, rotary: Rotary) -> Tensor:
        """Queries or keys, normalised and rotated."""
        heads = normed(norm, self._in_heads(x_BLF)) if self.norms_heads else self._in_heads(normed(norm, x_BLF))
        rotated = 2 * rotary[0].shape[-1]
        if not rotated:
            return heads.contiguous()
        if rotated == self.head_dim:
            return rotate(heads, rotary)
        return torch.cat((rotate(heads[..., :rotated], rotary), heads[..., rotated:]), -1)


def attention_of(shape: ModelShape) -> Attention:
    """The attention of a layer."""
    if not shape.kv_latent:
        return Attention(shape)
    from engine.models.latent import LatentAttention  # is put together from modules of this file

    return LatentAttention(shape)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)) where the shape is gated (arXiv:2002.05202), else down(act(up(x)))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.activation, self.plain = shape.mlp_activation, shape.plain_mlp
        self.alpha, self.limit = shape.activation_alpha, shape.activation_limit  # of clamped_silu
        self.gate = Linear(shape.hidden, shape.ffn, shape.mlp_bias) if shape.gated else None
        self.up = Linear(shape.hidden, shape.ffn, shape.mlp_bias)
        self.down = Linear(shape.ffn, shape.hidden, shape.mlp_bias)
        self.post_norm = None if shape.norms == "before" else RMSNorm(shape.hidden, eps=shape.norm_eps)

    def forward(self, x_BLE: Tensor) -> Tensor:
        return normed(self.post_norm, self.down(self._hidden(x_BLE)))

    def for_gradients(self, x_BLE: Tensor) -> Tensor:
        """A tensor like `forward(x)` and with its gradients: its numbers mean nothing where no norm follows."""
        if self.post_norm is not None:
            return self(x_BLE)
        return self.down.for_gradients(self._hidden(x_BLE))

    def _hidden(self, x_BLE: Tensor) -> Tensor:
        gate_BLF = None if self.gate is None else self.gate(x_BLE)
        if self.activation == "clamped_silu":
            assert gate_BLF is not None, "the shape has a gate"
            return clamped_swiglu(gate_BLF, self.up(x_BLE), self.alpha, self.limit)
        return activate(self.activation, self.up(x_BLE), gate_BLF)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


def activate(activation: str, up_BLF: Tensor, gate_BLF: Tensor | None = None) -> Tensor:
    """Input of the MLP's last matrix: act(up), or act(gate) times up where there is a gate."""
    if gate_BLF is None:
        return ACTIVATIONS[activation](up_BLF)
    return swiglu(gate_BLF, up_BLF) if activation == "silu" else ACTIVATIONS[activation](gate_BLF) * up_BLF


def clamped_swiglu(gate_BLF: Tensor, up_BLF: Tensor, alpha: float, limit: float) -> Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), with the gate at most `limit` and up within +-`limit`."""
    gate_BLF = gate_BLF.clamp(max=limit)
    return gate_BLF * (alpha * gate_BLF).sigmoid() * (up_BLF.clamp(-limit, limit) + 1)


class DenseAttention:
    """The default attention: dense, one device, causal or under another mask. Autograd saves the intermediates, so a
    recomputation ignores `saved` and computes everything."""

    def __init__(self, mask: Mask | None = None) -> None:
        self._mask = mask or Causal()

    def __call__(
        self,
        q_BLND: Tensor,
        k_BLKD: Tensor,
        v_BLKD: Tensor,
        *,
        sinks_N: Tensor | None = None,
        saved: SavedOutput | None = None,
        expand_NXC: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if expand_NXC is not None:
            k_BLKD, v_BLKD = Expansion.of(q_BLND, k_BLKD, expand_NXC).keys(k_BLKD, v_BLKD)
        return dense_attention(q_BLND, k_BLKD, v_BLKD, self._mask, sinks_N=sinks_N)

    def keep(self, out_BLND: Tensor, lse_BNL: Tensor, tail: float) -> None:
        return None


def project_whole(norm: Norm, attention: Attention, x_BLE: Tensor, rotary: Rotary) -> Projected:
    """The default beginning of a layer: queries, keys and values of all tokens at once."""
    return *attention.project(normed(norm, x_BLE), rotary), x_BLE


def add_whole_mlp(norm: Norm, mlp: MLP, x_BLE: Tensor, branch_BLE: Tensor | None = None) -> Tensor:
    """The default second half of a layer, the residual stream after the MLP: all tokens at once."""
    x_BLE = x_BLE if branch_BLE is None else x_BLE + branch_BLE
    return x_BLE + mlp(normed(norm, x_BLE))


def keep_all(layer: LayerFn, x_BLE: Tensor, rotary: Rotary, over_ranks: Attend | MixCall) -> Tensor:
    """The default activations: autograd saves everything."""
    return layer(x_BLE, rotary, over_ranks)


class Block(nn.Module):
    """One decoder layer: attention, or the mixer of a linear layer, then the MLP, which some models leave out of some
    layers."""

    attend: Attend
    mix: MixCall
    activations: Activations
    project: Project
    add_mlp: AddMLP
    attend_groups: AttendGroups | None
    joins_sum: bool  # whether `add_mlp` forms the sum of the residual stream before it, in one pass with its norm

    def __init__(
        self, shape: ModelShape, *, windowed: bool = False, linear: bool = False, with_mlp: bool = True
    ) -> None:
        super().__init__()
        self.windowed = windowed  # attends within the shape's window
        before = shape.norms != "after"
        if linear:
            self.mixer_norm: Norm = RMSNorm(shape.hidden, eps=shape.norm_eps)
            self.mixer = mixer_of(shape)
        else:
            self.attention_norm = RMSNorm(shape.hidden, eps=shape.norm_eps) if before else None
            self.attention = attention_of(shape)
        self.linear = linear
        self.enters = self.leaves = linear  # the layer before, or after, has tokens in the layout's order
        self.mlp_norm = RMSNorm(shape.hidden, eps=shape.norm_eps) if before and with_mlp else None
        self.mlp = MLP(shape) if with_mlp else None
        self.attend = DenseAttention(parse_mask(shape.window_mask) if windowed else None)
        self.mix = Mix()
        self.activations = keep_all
        self.project = project_whole
        self.add_mlp = add_whole_mlp
        self.attend_groups = None
        self.joins_sum = False

    def forward(self, x_BLE: Tensor, rotary: Rotary) -> Tensor:
        return self.activations(self.layer, x_BLE, rotary, self.mix if self.linear else self.attend)

    def layer(self, x_BLE: Tensor, rotary: Rotary, over_ranks: AttendCall | MixCall) -> Tensor:
        """The layer's mathematics. Pure but for `over_ranks`, which a linear layer calls for its mixer and any other
        for attention, so it may be run again to recompute activations."""
        if not self.linear:
            branch_BLE, x_BLE = self._attended(x_BLE, rotary, cast(AttendCall, over_ranks))
        else:
            mix = cast(MixCall, over_ranks)
            x_BLE = mix.enter(x_BLE) if self.enters else x_BLE
            branch_BLE = mix(self._mixed, x_BLE)
        if self.mlp is None:
            x_BLE = x_BLE + branch_BLE
        elif self.joins_sum:
            x_BLE = self.add_mlp(self.mlp_norm, self.mlp, x_BLE, branch_BLE)
        else:
            x_BLE = x_BLE + branch_BLE
            del branch_BLE  # where nothing saves it: the MLP needs the memory
            x_BLE = self.add_mlp(self.mlp_norm, self.mlp, x_BLE)
        return mix.leave(x_BLE) if self.leaves else x_BLE

    def _attended(self, x_BLE: Tensor, rotary: Rotary, attend: AttendCall) -> tuple[Tensor, Tensor]:
        """Attention's branch, and x."""
        if self.attend_groups is not None and torch.is_grad_enabled():
            again = cast("OnceAndAgain", attend)
            out_BLND, x_BLE = self.attend_groups(self.attention_norm, self.attention, x_BLE, rotary, again)
            return self.attention(out_BLND), x_BLE
        *projected, x_BLE = self.project(self.attention_norm, self.attention, x_BLE, rotary)
        qkv, gate = projected[:3], projected[3:]
        del projected
        out_BLND, _lse = attend(*qkv, **self.attention.given())
        del qkv
        return self.attention(out_BLND, *gate), x_BLE

    def _mixed(self, x_BLE: Tensor, shard: LinearShard) -> Tensor:
        """The mixer's branch of consecutive tokens."""
        branch_BLE: Tensor = self.mixer(normed(self.mixer_norm, x_BLE), shard)
        return branch_BLE


class Head(nn.Module):
    """LM head and loss in one module, so that the logits of a long sequence need never exist."""

    loss_sum: LossSum

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.weight = None if shape.tied else nn.Parameter(torch.empty(shape.vocab, shape.hidden))
        self.loss_sum = plain_loss_sum

    def forward(self, x_BLE: Tensor, labels_BL: Tensor | None, tied_VE: Tensor | None = None) -> Tensor:
        """The sum of the losses, or without labels the logits; `tied_VE` is the embedding of a head without weight."""
        weight_VE = self.weight if tied_VE is None else tied_VE
        assert weight_VE is not None, "a tied head is called with the embedding"
        if labels_BL is None:
            return linear(x_BLE, [weight_VE])
        with record_function(LM_HEAD):
            return self.loss_sum(x_BLE.flatten(0, 1), computed(weight_VE), labels_BL.flatten())


class Decoder(nn.Module):
    """Embedding, blocks, final norm, LM head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.shards = 1  # that a sequence is divided into, of equal length; one of them is here
        self.longest = 0  # tokens of the longest document that a packed row may hold; 0: the sequence is one text
        self.embedding = Embedding(shape.vocab, shape.hidden)
        kinds = zip(shape.windowed, shape.linear_layers, shape.mlps, strict=True)
        self.blocks = nn.ModuleList(
            Block(shape, windowed=windowed, linear=linear, with_mlp=mlp) for windowed, linear, mlp in kinds
        )
        for block, following in itertools.pairwise(self.blocks):
            if block.linear and following.linear:
                block.leaves = following.enters = False
        self.norm = RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.head = Head(shape)

    def adapt(self, lora: Lora, frozen: torch.dtype) -> None:
        """Freeze all parameters, in the dtype `frozen`, and add adapters without values, in the dtype that the
        parameters had. Nothing is ever added to what is frozen, so it needs no master weights.

        Raises ValueError for a matrix that the model does not have, and for a rank above both of its sides.
        """
        if reason := adapters_unsupported_reason(self.shape, lora):
            raise ValueError(reason)
        dtype = self.norm.weight.dtype
        self.to(frozen).requires_grad_(False)
        for block in self.blocks:
            block.attention.plain = block.mlp.plain = False
            for target in lora.targets:
                block.get_submodule(MODULES[target]).adapt(lora, dtype)

    def forward(self, tokens_BL: Tensor, positions_L: Tensor, labels_BL: Tensor | None = None) -> Tensor:
        """Sum of the tokens' losses in fp32 or wider; without labels, the logits [B, L, V].

        Args:
            tokens_BL: token ids held here.
            positions_L: their positions in the whole sequence, or in their documents, for RoPE.
            labels_BL: the token to predict after each; -100 where there is none.
        """
        shape = self.shape
        x_BLE = self.embedding(tokens_BL)
        if shape.embedding_scale != 1:
            x_BLE = x_BLE * shape.embedding_scale
        dtype = accumulation_dtype(x_BLE.dtype)
        seq_len = self.longest or len(positions_L) * self.shards
        own = shape.rope_of_window
        tables = {each: rotary_of(shape, each, positions_L, dtype, seq_len) for each in set(own)}
        for block, has_own_base in zip(self.blocks, own, strict=True):
            x_BLE = block(x_BLE, tables[has_own_base])
        return self.head(self.norm(x_BLE), labels_BL, self.embedding.weight if shape.tied else None)
