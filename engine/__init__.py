"""BurstEngine (arXiv:2509.19836): distributed training of transformers on extremely long sequences.

Packages, lowest first: ops, cuda; memory; attention; lm_head; models; layers, checkpoint, hf, data, profile; tasks;
training. Nothing here imports harness, cluster or baselines. Public names are loaded on first use, so that planning a
sweep never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.attention.context import ContextParallel
    from engine.attention.prepared import burst_attention, prepare_attention
    from engine.attention.resolve import choose_layout

__all__ = ["ContextParallel", "burst_attention", "choose_layout", "prepare_attention"]

_MODULES = {
    "ContextParallel": "engine.attention.context",
    "burst_attention": "engine.attention.prepared",
    "choose_layout": "engine.attention.resolve",
    "prepare_attention": "engine.attention.prepared",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}; choose one of {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
