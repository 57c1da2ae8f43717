"""ring-flash-attention's zigzag ring; run by its interpreter (baselines/programs/attention.py).

Its package imports an adapter for transformers, which current transformers break: the ring is imported past it.
"""

import importlib
import importlib.util
import os
import sys
import types


def prepare(request, group):
    folder = os.path.dirname(importlib.util.find_spec("ring_flash_attn").origin)
    package = types.ModuleType("ring_flash_attn")
    package.__path__ = [folder]
    sys.modules["ring_flash_attn"] = package
    ring = importlib.import_module("ring_flash_attn.zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
    return lambda q, k, v: ring(q, k, v, causal=True, group=group)
