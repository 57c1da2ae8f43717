"""Floating-point operations of one trial: the only FLOP formula of the project; every throughput and MFU uses it.

A multiply-add is two operations. Only matrix multiplications count: norms, softmax, RoPE and the embedding look-up are
free. Attention counts the (query, key) pairs its mask really shows, so causal and windowed runs get no credit for
work that they skip. The totals are those of a whole step over all ranks. Conventions of the field, spelled out in
docs/metrics.md: PaLM (arXiv:2204.02311, appendix B) for model against hardware FLOPs, FlashAttention
(arXiv:2205.14135) for the 2.5 of its backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.attention.geometry.layout import tail_cut
from engine.attention.masks import parse_mask
from engine.attention.masks.mask import FirstRows
from engine.checkpoint.counts import layers_recomputed
from engine.settings import ModelShape, TrialSettings

# Attention forward is two products (QK^T, PV). Its backward needs four (dV, dP, dQ, dK); kernels that never store the
# scores run a fifth, QK^T again. Model FLOPs leave that fifth out, the kernel convention keeps it.
ATTENTION_BACKWARD = 2.0
ATTENTION_KERNEL_BACKWARD = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """FLOPs of one step over all ranks: the forward pass by part of the model, and the work that is repeated."""

    layers: float  # projections and MLP of all layers
    head: float  # hidden states to vocabulary
    attention: float  # QK^T and PV over the visible pairs
    recomputed_layers: float = 0.0  # forward work repeated in the backward pass by activation checkpointing
    recomputed_attention: float = 0.0

    @property
    def forward(self) -> float:
        """Model FLOPs of the forward pass."""
        return self.layers + self.head + self.attention

    @property
    def model(self) -> float:
        """Model FLOPs of forward and backward: three times the forward; nothing recomputed is counted."""
        return 3 * self.forward

    @property
    def kernel(self) -> float:
        """Model FLOPs plus QK^T once more, as attention kernels are usually quoted: 3.5 x forward for attention."""
        return self.model + (ATTENTION_KERNEL_BACKWARD - ATTENTION_BACKWARD) * self.attention

    @property
    def hardware(self) -> float:
        """FLOPs that are executed: with the kernels' own recomputation of QK^T and all activation checkpointing."""
        return self.kernel + self.recomputed_layers + self.recomputed_attention


def layer_matmul_parameters(model: ModelShape) -> int:
    """Weights of one layer that take part in a matrix multiplication: all but those of its norms."""
    return model.layer_parameters - model.layer_norm_parameters


def visible_pairs(mask: str, seq_len: int) -> int:
    """(query, key) pairs of one sequence that `mask` shows: S^2 when full, S(S+1)/2 when causal, exact for windows.

    Raises ValueError for a mask that does not exist.
    """
    return parse_mask(mask).area(seq_len)


def attention_forward(settings: TrialSettings) -> float:
    """FLOPs of one attention forward over all replicas: 4 x N x D x visible pairs x sequences, whatever K is."""
    pairs = visible_pairs(settings.mask, settings.seq_len)
    return 4.0 * settings.model.heads * settings.model.head_dim * pairs * sequences_per_step(settings)


def work_of(settings: TrialSettings) -> Work:
    """FLOPs of one training step, or of one call for the other tasks.

    Checkpointing repeats the matrix multiplications of each layer it recomputes once, except the MLP's last, whose
    result no gradient needs; with `checkpoint.every` k those of k - 1 of k such layers once more, or as often as
    `checkpoint.replay: bisect` runs them, and attention for the part of the sequence whose outputs are not kept
    (`checkpoint.tail`): once, under `bisect` in every run of its layer. A layer that is not recomputed repeats the
    MLP's matrices before its last one for the tokens whose products are not kept (`checkpoint.mlp`); tiled projections
    repeat queries and keys where these are normed. The fused LM head forms its gradients in the forward pass and
    repeats nothing.
    """
    model, checkpoint = settings.model, settings.checkpoint
    tokens = tokens_per_step(settings)
    head = 2.0 * tokens * model.vocab * model.hidden
    if settings.task == "lm_head":
        return Work(layers=0.0, head=head, attention=0.0)
    attention = attention_forward(settings)
    if settings.task == "attention":
        return Work(layers=0.0, head=0.0, attention=attention)
    layers = 2.0 * tokens * model.layers * layer_matmul_parameters(model)
    again = checkpoint.layers_again(model.layers)
    layer = layers / model.layers
    return Work(
        layers=layers,
        head=head,
        attention=attention * model.layers,
        recomputed_layers=(again * layer + _for_inputs(settings) * layer - again * _last_matrix(settings))
        + _repeated_by_tiles(settings),
        recomputed_attention=attention * _attention_again(settings),
    )


def _for_inputs(settings: TrialSettings) -> int:
    """Layers that backward runs only for the next layer's input, within groups; their own recomputation comes later."""
    again = settings.checkpoint.layers_again(settings.model.layers)
    return layers_recomputed(settings.checkpoint, again) if again else 0


def _last_matrix(settings: TrialSettings) -> float:
    """One run of the last matrix of a layer's MLP: torch's checkpoint ends a recomputation before it."""
    return 2.0 * tokens_per_step(settings) * settings.model.ffn * settings.model.hidden


def _attention_again(settings: TrialSettings) -> float:
    """Layers' forwards of attention that backward runs, in visible pairs: those of the sequence's head, whose outputs
    are not kept. Once a layer, since a group that holds computes for the layers' own recomputation; under `bisect`
    every run's."""
    mask, seq_len, again = parse_mask(settings.mask), settings.seq_len, settings.checkpoint
    cut = tail_cut(settings.checkpoint.tail, seq_len, settings.cp_size)
    head = FirstRows(mask, cut).area(seq_len) / max(1, mask.area(seq_len))
    runs = again.layers_again(settings.model.layers)
    return head * (runs + (_for_inputs(settings) if again.replay == "bisect" else 0))


def _repeated_by_tiles(settings: TrialSettings) -> float:
    """FLOPs that are repeated in backward outside of a layer's recomputation, because their results were not kept.

    The MLP of a layer that is not computed again: its first matrix, or the first two of a gated one, for the tokens
    whose products are not kept (`checkpoint.mlp`). Tiled projections: queries and keys where these are normed, since
    their norm's gradient needs its input.
    """
    model, tokens = settings.model, tokens_per_step(settings)
    whole = model.layers - settings.checkpoint.layers_again(model.layers)
    first = (2 if model.gated else 1) * model.hidden * model.ffn
    again = model.qk_norm and settings.projection_tiles > 1
    normed = model.hidden * (model.heads + model.kv_heads) * model.head_dim if again else 0
    kept = round(settings.checkpoint.mlp * tokens_of_rank(settings)) / tokens_of_rank(settings)
    return 2.0 * tokens * (whole * (1 - kept) * first + model.layers * normed)


def tokens_of_rank(settings: TrialSettings) -> int:
    """Tokens that one rank computes at once: those of a micro-batch."""
    return settings.seq_len // settings.cp_size * settings.batch_size


def sequences_per_step(settings: TrialSettings) -> int:
    """Sequences of one optimizer step over all micro-batches and replicas; of one call for the other tasks."""
    micro_batches = settings.gradient_accumulation if settings.task == "train" else 1
    return settings.batch_size * settings.dp_size * micro_batches


def tokens_per_step(settings: TrialSettings) -> int:
    """Tokens of these sequences."""
    return settings.seq_len * sequences_per_step(settings)


def seconds_at_kernel_speed(work: Work, *, gemm: float, attention_forward: float, attention_backward: float) -> float:
    """Seconds of one GPU doing all of `work` at the given TFLOP/s, without repeated work and waiting.

    `attention_backward` is in the kernel convention, so the recomputed QK^T inside the kernel costs its time here.
    """
    matmuls = 3 * (work.layers + work.head) / gemm
    attention = work.attention / attention_forward + ATTENTION_KERNEL_BACKWARD * work.attention / attention_backward
    return (matmuls + attention) / 1e12
