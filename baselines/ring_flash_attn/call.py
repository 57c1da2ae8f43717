"""ring-flash-attention's rings, the zigzag one unless `ring` names another; run by its interpreter
(baselines/called_attention.py).

Its package imports an adapter for transformers, which current transformers break: the ring is imported past it.
"""

import importlib
import importlib.util
import os
import sys
import types

MODULES = {"zigzag": "zigzag_ring_flash_attn", "plain": "ring_flash_attn", "striped": "stripe_flash_attn"}


def prepare(request, group):
    spec = importlib.util.find_spec("ring_flash_attn")
    package = types.ModuleType("ring_flash_attn")
    package.__spec__, package.__path__ = spec, [os.path.dirname(spec.origin)]
    sys.modules["ring_flash_attn"] = package
    name = MODULES[request.get("ring", "zigzag")]
    ring = getattr(importlib.import_module(f"ring_flash_attn.{name}"), f"{name}_func")
    return lambda q, k, v: ring(q, k, v, causal=True, group=group)
