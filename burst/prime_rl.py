"""prime-rl's context parallelism (`cp_style = "ulysses"`) with this package's attention: `install`.

prime-rl asks two functions of a module to replace attention, one for its own models and one for those of transformers.
`install` puts others in their place before the trainer starts. prime-rl still cuts each packed batch into consecutive
parts, and publishes where the documents of the whole sequence begin. Layers that are no attention (Mamba, DeltaNet)
keep prime-rl's own way.

Shape letters: L this rank's tokens, N query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import ModuleType

import torch.distributed as dist
from torch import Tensor, nn

from burst.transformers import register
from engine.attention.context import ContextParallel
from engine.attention.masks import Documents, Mask
from engine.attention.plan import mask_of
from engine.attention.prepared import burst_attention

_ULYSSES = "prime_rl.trainer.models.layers.ulysses_attn"
# Attention of prime-rl's own models, as its function for them lists it.
_CLASSES = (
    ("prime_rl.trainer.models.layers.attn", "FlashAttention"),
    ("prime_rl.trainer.models.afmoe.modeling_afmoe", "AfmoeFlashAttention"),
    ("prime_rl.trainer.models.qwen3_5_moe.modeling_qwen3_5_moe", "Qwen3_5MoeGatedFlashAttention"),
    ("prime_rl.trainer.models.qwen3_5.modeling_qwen3_5", "Qwen3_5GatedFlashAttention"),
)


def install() -> None:
    """Let `cp_style = "ulysses"` of prime-rl mean this package's attention.

        import burst.prime_rl
        from prime_rl.trainer.rl.train import main   # or of sft

        burst.prime_rl.install()
        main()

    Raises ImportError without prime-rl, or where it has no functions of these names.
    """
    try:
        ulysses = importlib.import_module(_ULYSSES)
    except ImportError as error:
        raise ImportError(f"install needs prime-rl: {error}") from error
    if not hasattr(ulysses, "ULYSSES_PARAMS"):
        raise ImportError(f"{_ULYSSES} has no ULYSSES_PARAMS; this adapter knows prime-rl of August 2026")

    def of_own_models(process_group: dist.ProcessGroup, attn_impl: str = "") -> None:
        for place, name in _CLASSES:
            getattr(importlib.import_module(place), name)._compute_attention = _attention(process_group, ulysses)

    def of_transformers(process_group: dist.ProcessGroup) -> None:
        register(_ranks(process_group))

    for name, made in (("substitute_ulysses_attn", of_own_models), ("substitute_hf_ulysses_attn", of_transformers)):
        if not hasattr(ulysses, name):
            raise ImportError(f"{_ULYSSES} has no {name}; this adapter knows prime-rl of August 2026")
        setattr(ulysses, name, made)


@lru_cache(maxsize=16)
def _ranks(group: dist.ProcessGroup) -> ContextParallel:
    """Those of a group, in the order in which prime-rl cuts. Collective at first."""
    return ContextParallel(group, layout="contiguous")


def _attention(process_group: dist.ProcessGroup, ulysses: ModuleType) -> Callable[..., Tensor]:
    """What a layer calls: attention of packed documents over the whole sequence, [L, N, D]."""

    def compute_attention(
        layer: nn.Module, q_LND: Tensor, k_LKD: Tensor, v_LKD: Tensor, cu_seqlens: Tensor, max_seqlen: int
    ) -> Tensor:
        window: int | None = getattr(layer, "sliding_window", None)  # holds the token itself
        # The boundaries that are passed are those of this rank's tokens.
        mask = _documents(mask_of(None, ulysses.ULYSSES_PARAMS["cu_seqlens"], None), window)
        out_LND: Tensor = burst_attention(q_LND, k_LKD, v_LKD, mask=mask, cp=_ranks(process_group), tensor_layout="THD")
        return out_LND

    return compute_attention


@lru_cache(maxsize=16)
def _documents(documents: Mask, window: int | None) -> Mask:
    assert isinstance(documents, Documents), "boundaries make documents"
    return documents if window is None else replace(documents, left=window - 1)
