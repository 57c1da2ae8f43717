"""Megatron-LM's tensor parallelism with sequence parallelism, native.

`tp_size` ranks hold the columns of every matrix between them, and 1/tp_size of the tokens in norms and residuals
(`tensor_parallel.py`). Sources: arXiv:1909.08053, arXiv:2205.05198; `--tensor-model-parallel-size` with
`--sequence-parallel` of NVIDIA/Megatron-LM.

Differences from the original. Gathered tokens are kept for backward where a layer is not recomputed; Megatron gathers
them again, beside a product. Results are summed in fp32 by an all-to-all, in place of a reduce-scatter in bf16. The
vocabulary-parallel loss gathers two numbers per token in place of three all-reduces. Query, K and V heads, the MLP's
width and the vocabulary have to divide by `tp_size`; Megatron pads the vocabulary. It has not been measured on GPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baselines.ring_baseline import fixed_settings_unsupported_reason
from engine.attention.geometry.layout import split_unsupported_reason
from engine.attention.resolve import Choices, trial_choices
from engine.method import EngineCommand

if TYPE_CHECKING:
    from engine.attention.algorithms.saved import AttentionFn
    from engine.attention.context import ContextParallel
    from engine.parallelize import WholeMatrices
    from engine.settings import TrialSettings


class MegatronTensorParallel(EngineCommand):
    """Each rank attends with its share of the heads over the whole sequence, which it forms of gathered tokens."""

    name = "megatron_tp"
    system = "Megatron-LM"
    source = "arXiv:2205.05198"
    grad_comm_dtype = "input"

    def refuse(self, settings: TrialSettings) -> str | None:
        if settings.cp_size > 1:
            return f"megatron_tp runs without context parallelism, found cp_size {settings.cp_size}; set cp_size to 1"
        if settings.task == "attention" and settings.tp_size > 1:
            return (
                "megatron_tp divides matrices as well as heads, which task attention does not have; set task to train"
            )
        fixed = {
            "layout": "contiguous",
            "schedule": None,
            "backward": None,
            "exchange": None,
        }
        return (
            fixed_settings_unsupported_reason(settings, fixed)
            or indivisible_reason(settings)
            or split_unsupported_reason("contiguous", settings.row_tokens, settings.tp_size)
        )

    def layout(self, settings: TrialSettings) -> str:
        return "contiguous"

    def choices(self, settings: TrialSettings) -> Choices:
        # The tokens of all ranks are here, of some heads: one rank's attention.
        return trial_choices(settings, self.grad_comm_dtype)._replace(
            schedule="ring", backward="auto", exchange="relay"
        )

    def attention(self, cp: ContextParallel, settings: TrialSettings, mask: str | None = None) -> AttentionFn:
        from engine.attention.bound import BoundAttention
        from engine.attention.context import ContextParallel as Context

        return BoundAttention(Context.single("contiguous"), settings, self.choices(settings), mask)

    def tensor_parallel(self, cp: ContextParallel, settings: TrialSettings) -> WholeMatrices:
        from baselines.megatron_tp.tensor_parallel import TensorParallel

        return TensorParallel(cp, settings)


def indivisible_reason(settings: TrialSettings) -> str | None:
    """Why these settings cannot be divided among `tp_size` ranks, or None."""
    model, ranks = settings.model, settings.tp_size
    if ranks == 1:
        return None
    if settings.packs:
        return (
            f"{settings.method} divides matrices among tp_size {ranks} ranks for sequences of one text, found mask "
            f"{settings.mask}, which packs documents; set mask to causal, or tp_size to 1"
        )
    counts = {
        "query heads": model.heads,
        "KV heads": model.kv_heads,
        "columns of the MLP": model.ffn,
        "words of the vocabulary": model.vocab,
    }
    for label, count in counts.items():
        if count % ranks:
            return (
                f"{settings.method} divides {label} among tp_size {ranks} ranks, found {count} of model {model.name}; "
                f"choose a tp_size that divides {count}"
            )
    divisible = {
        "output_bias": False, "mlp_bias": False, "qk_norm_whole": False, "norms": "before", "window": 0, "sinks": False,
        "kv_latent": 0,
    }  # fmt: skip
    for name, of_llama in divisible.items():
        if getattr(model, name) != of_llama:
            return (
                f"{settings.method} cannot divide {name} {getattr(model, name)} of model {model.name} among tp_size "
                f"{ranks} ranks; choose a model without it, or a method with tp_size 1"
            )
    for name, found, alone in (
        ("mlp_tiles", settings.mlp_tiles, 1),
        ("projection_tiles", settings.projection_tiles, 1),
        ("head_tiles", settings.head_tiles, 0),
        ("loss_kernel", settings.loss_kernel, "own"),
        ("linear_dtype", settings.linear_dtype, "same"),
        ("sharding", settings.sharding, "full"),
    ):
        if found != alone:
            return f"{settings.method} has no {name} {found}; set {name} to {alone}"
    return None


METHOD = MegatronTensorParallel()
