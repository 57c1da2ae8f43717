"""torch's flexible attention on CPU ranks, for targets whose context parallelism is built on it.

torch refuses its backward on CPUs, though the dense computation behind it, which runs without a compiler, has one.
It also cuts masks in blocks of 128 tokens, of which each rank has to have whole ones: more than a case has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch.nn.attention import flex_attention


def allow_cpu() -> None:
    """Let `flex_attention` compute gradients of CPU tensors, by its dense computation."""
    module: Any = flex_attention
    module._validate_device = lambda *_: None


@contextlib.contextmanager
def blocks_of(tokens: int, ring: ModuleType) -> Iterator[None]:
    """Inside, blocks of masks have so many tokens, and `ring`, torch's module of context parallelism, makes masks
    without a compiler."""
    module: Any = flex_attention
    of_ring: Any = ring
    before: int = module._DEFAULT_SPARSE_BLOCK_SIZE
    module._DEFAULT_SPARSE_BLOCK_SIZE = tokens
    of_ring._compiled_create_block_mask = flex_attention.create_block_mask
    try:
        yield
    finally:
        module._DEFAULT_SPARSE_BLOCK_SIZE = before
