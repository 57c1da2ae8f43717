"""BurstEngine's attention for your own model and trainer: one sequence over many ranks, exact. The public package.

    import burst

    cp = burst.ContextParallel()
    out = burst.burst_attention(q, k, v, cp=cp)   # in a model of your own
    burst.register(cp)                            # in a model of transformers: attn_implementation="burst"

Nothing of the benchmark harness is imported. Names are loaded on first use.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burst.batch import shard_batch
    from burst.transformers import register
    from engine.attention.context import ContextParallel
    from engine.attention.masks import (
        BlockSparse,
        Causal,
        Documents,
        Full,
        LocalGlobal,
        Mask,
        SlidingWindow,
        Strided,
    )
    from engine.attention.prepared import burst_attention, prepare_attention
    from engine.attention.resolve import choose_layout
    from engine.lm_head.log_probs import fused_log_probs

_MODULES = {
    "BlockSparse": "engine.attention.masks",
    "Causal": "engine.attention.masks",
    "ContextParallel": "engine.attention.context",
    "Documents": "engine.attention.masks",
    "Full": "engine.attention.masks",
    "LocalGlobal": "engine.attention.masks",
    "Mask": "engine.attention.masks",
    "SlidingWindow": "engine.attention.masks",
    "Strided": "engine.attention.masks",
    "burst_attention": "engine.attention.prepared",
    "choose_layout": "engine.attention.resolve",
    "fused_log_probs": "engine.lm_head.log_probs",
    "prepare_attention": "engine.attention.prepared",
    "register": "burst.transformers",
    "shard_batch": "burst.batch",
}

__all__ = [
    "BlockSparse",
    "Causal",
    "ContextParallel",
    "Documents",
    "Full",
    "LocalGlobal",
    "Mask",
    "SlidingWindow",
    "Strided",
    "burst_attention",
    "choose_layout",
    "fused_log_probs",
    "prepare_attention",
    "register",
    "shard_batch",
]


def _check_engine(beside: Path) -> None:
    """Raises ImportError where a package or file `engine` of the user's own comes before the one of this package."""
    found = find_spec("engine")
    place = None if found is None or found.origin is None else Path(found.origin).resolve().parent
    if place != beside / "engine":
        raise ImportError(
            f"import burst found engine in {place}, and needs the package engine in {beside}; rename your own module "
            "engine, or put its folder behind that one in sys.path"
        )


_check_engine(Path(__file__).resolve().parents[1])


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'burst' has no attribute {name!r}; choose one of {', '.join(__all__)}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
