"""Floating-point operations of one trial: the only FLOP formula of the project; every throughput and MFU uses it.

A multiply-add is two operations. Only matrix multiplications count: norms, softmax, RoPE and the embedding look-up are
free. Attention counts the (query, key) pairs its mask really shows, so causal and windowed runs get no credit for
work that they skip. The totals are those of a whole step over all ranks. Conventions of the field, spelled out in
docs/reference.md: PaLM (arXiv:2204.02311, appendix B) for model against hardware FLOPs, FlashAttention
(arXiv:2205.14135) for the 2.5 of its backward. A matrix takes 6 FLOPs per parameter and token (arXiv:2001.08361,
section 2.1): 2 each in forward, for the gradient of its input and for its own. A frozen one has no gradient of its own
and takes 4; its adapters (LoRA, arXiv:2106.09685) are matrices of 6. A linear layer counts the products of its
recurrence, not those that a chunked form adds: per token and value head in forward 2 x N x P each for writing the state
[N, P] and for reading it (Mamba-2, arXiv:2405.21060), and for the delta rule's own read of it (gated delta net,
arXiv:2412.06464). Megatron-LM (training.py, num_floating_point_operations) counts 7 x N x P in place of 4 for Mamba-2,
8 x P x P in place of 6 x N x P for gated delta nets, and their convolution, which is no matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.attention.masks import parse_mask
from engine.checkpoint.counts import (
    head_share,
    layer_pairs,
    packed_shares,
    repeated_attention,
    repeated_products,
)
from engine.settings import TrialSettings

# Attention forward is two products (QK^T, PV). Its backward needs four (dV, dP, dQ, dK); kernels that never store the
# scores run a fifth, QK^T again. Model FLOPs leave that fifth out, the kernel convention keeps it.
ATTENTION_BACKWARD = 2.0
ATTENTION_KERNEL_BACKWARD = 2.5


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFlops:
    """FLOPs of one step over all ranks: the forward pass by part of the model, and the work that is repeated."""

    layers: float  # projections and MLP of all layers; adapters, and the recurrences of linear layers, among them
    head: float  # hidden states to vocabulary
    attention: float  # QK^T and PV over the visible pairs
    recomputed_layers: float = 0.0  # forward work repeated in the backward pass by activation checkpointing
    recomputed_attention: float = 0.0
    frozen_layers: float = 0.0  # of `layers`, those of matrices whose own gradient is not formed
    frozen_head: float = 0.0  # of `head` likewise

    @property
    def forward(self) -> float:
        """Model FLOPs of the forward pass."""
        return self.layers + self.head + self.attention

    @property
    def model(self) -> float:
        """Model FLOPs of forward and backward: three times the forward, twice that of a frozen matrix; nothing
        recomputed is counted."""
        return self.all_layers + self.all_head + 3 * self.attention

    @property
    def all_layers(self) -> float:
        """Model FLOPs of the layers' matrices, forward and backward."""
        return 3 * self.layers - self.frozen_layers

    @property
    def all_head(self) -> float:
        """Model FLOPs of the LM head, forward and backward."""
        return 3 * self.head - self.frozen_head

    @property
    def kernel(self) -> float:
        """Model FLOPs plus QK^T once more, as attention kernels are usually quoted: 3.5 x forward for attention."""
        return self.model + (ATTENTION_KERNEL_BACKWARD - ATTENTION_BACKWARD) * self.attention

    @property
    def hardware(self) -> float:
        """FLOPs that are executed: with the kernels' own recomputation of QK^T and all activation checkpointing."""
        return self.kernel + self.recomputed_layers + self.recomputed_attention


def visible_pairs(mask: str, seq_len: int) -> int:
    """(query, key) pairs of one sequence that `mask` shows: S^2 when full, S(S+1)/2 when causal, exact for windows.

    Raises ValueError for a mask that does not exist.
    """
    return parse_mask(mask).area(seq_len)


def counted_flops(settings: TrialSettings, work: StepFlops) -> float:
    """FLOPs behind the TFLOP/s of a trial: of attention alone in the kernel convention, else model FLOPs."""
    return work.kernel if settings.task == "attention" else work.model


def attention_forward(settings: TrialSettings) -> float:
    """FLOPs of one attention forward over all replicas: 2 x N x (D of K + D of V) x visible pairs x sequences, whatever
    K is. Where K and V are formed from a latent, their matrix counts once a token among those of the layer, however
    often ranks expand what they receive."""
    return _attention_flops(settings, visible_pairs(settings.mask, settings.seq_len))


def _attention_flops(settings: TrialSettings, pairs: float) -> float:
    """Of one layer whose mask shows so many pairs of a sequence."""
    model = settings.model
    return 2.0 * model.heads * (model.head_dim + model.output_dim) * pairs * sequences_per_step(settings)


def work_of(settings: TrialSettings) -> StepFlops:
    """FLOPs of one training step, or of one call for the other tasks.

    Repeated work is that of `engine.checkpoint.counts`. The fused LM head forms its gradients in the forward pass and
    repeats nothing.
    """
    model, checkpoint = settings.model, settings.checkpoint
    tokens = tokens_per_step(settings)
    head = 2.0 * tokens * model.vocab * model.hidden
    if settings.task == "lm_head":
        return StepFlops(layers=0.0, head=head, attention=0.0)
    if settings.task == "linear":
        return StepFlops(layers=2.0 * tokens * model.linear_layer_products, head=0.0, attention=0.0)
    if settings.task == "attention":
        return StepFlops(layers=0.0, head=0.0, attention=attention_forward(settings))
    attention = _attention_flops(settings, layer_pairs(settings))
    adapted, matrices = settings.lora is not None, 2.0 * tokens * model.layers * model.layer_matrices
    recurrences = 2.0 * tokens * model.layers * model.recurrence_products
    return StepFlops(
        layers=matrices + recurrences + (2.0 * tokens * settings.trained_parameters if adapted else 0.0),
        frozen_layers=matrices if adapted else 0.0,
        head=head,
        frozen_head=head if adapted else 0.0,
        attention=attention * model.layers,
        recomputed_layers=repeated_products(
            settings,
            checkpoint,
            projection_tiles=settings.projection_tiles,
            mlp_tiles=settings.mlp_tiles,
            head_groups=settings.head_groups,
            tokens=tokens,
            rank_tokens=tokens_of_rank(settings),
        ),
        recomputed_attention=attention
        * repeated_attention(checkpoint, model.layers, head_share(settings, checkpoint.tail)),
    )


def work_on_documents(work: StepFlops, settings: TrialSettings, tokens: float, pairs: float) -> StepFlops:
    """`work_of` a step whose packed rows hold so many tokens and visible pairs in place of one document each: padding
    is no work, and attention counts the pairs that documents show."""
    of_tokens, of_pairs = packed_shares(settings, tokens, pairs)
    return StepFlops(
        layers=work.layers * of_tokens,
        frozen_layers=work.frozen_layers * of_tokens,
        head=work.head * of_tokens,
        frozen_head=work.frozen_head * of_tokens,
        attention=work.attention * of_pairs,
        recomputed_layers=work.recomputed_layers * of_tokens,
        recomputed_attention=work.recomputed_attention * of_pairs,
    )


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


def seconds_at_kernel_speed(
    work: StepFlops, *, gemm: float, attention_forward: float, attention_backward: float
) -> float:
    """Seconds of one GPU doing all of `work` at the given TFLOP/s, without repeated work and waiting.

    `attention_backward` is in the kernel convention, so the recomputed QK^T inside the kernel costs its time here.
    """
    matmuls = (work.all_layers + work.all_head) / gemm
    attention = work.attention / attention_forward + ATTENTION_KERNEL_BACKWARD * work.attention / attention_backward
    return (matmuls + attention) / 1e12
