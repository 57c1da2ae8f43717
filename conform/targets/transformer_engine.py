"""TransformerEngine's context parallelism around its fused attention of cuDNN: one variant for each way to send.

Its kernels need GPUs and 16 bits. Tokens are in zigzag layout for each of them.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conform.positions import positions_of, put_together, take
from conform.target import CaseProblem, variant_of

VARIANTS = ("p2p", "all_gather", "a2a")
VARIANT = variant_of(__name__, VARIANTS)
NAME = f"TransformerEngine {VARIANT}"
RANKS = (2, 4)
DEVICES = ("cuda",)
DTYPE = "bf16"
REQUIRES = ("transformer_engine",)
INSTALL = "pip install 'transformer_engine[pytorch]==2.12.0'"
_MASKS = ("causal", "full") if VARIANT == "p2p" else ("causal", "full", "window")  # its ring takes no window
CAPABILITIES = (*_MASKS, "grouped_heads", "batch", "bf16", "scale", "frozen", "two_models")


def VERSION() -> str:
    return version("transformer_engine")


@lru_cache
def _attention(heads: tuple[int, int, int], mask: str, scale: float | None, group: dist.ProcessGroup) -> Any:
    query_heads, kv_heads, head_dim = heads
    attention = importlib.import_module("transformer_engine.pytorch").DotProductAttention(
        query_heads, head_dim, num_gqa_groups=kv_heads, qkv_format="bshd", attn_mask_type=mask, softmax_scale=scale
    )
    ranks = dist.get_process_group_ranks(group)
    attention.set_context_parallel_group(group, ranks, torch.cuda.Stream(), VARIANT)
    return attention


def _positions(problem: CaseProblem) -> list[Tensor]:
    return [positions_of("zigzag", problem.tokens, rank, problem.ranks) for rank in range(problem.ranks)]


def shard(whole: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return take(whole, dim, _positions(problem)[problem.rank])


def attention(q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, problem: CaseProblem) -> Tensor:
    assert problem.group is not None
    heads = problem.heads, problem.kv_heads, problem.head_dim
    mask = "causal" if problem.mask == "causal" else "no_mask"
    window = (-1, 0 if mask == "causal" else -1) if problem.window is None else (problem.window, 0)
    out: Tensor = _attention(heads, mask, problem.scale, problem.group)(
        q_BLND, k_BLKD, v_BLKD, attn_mask_type=mask, window_size=window
    )
    return out.unflatten(-1, (problem.heads, problem.head_dim))


def gather(part: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return put_together(part, dim, _positions(problem), problem)
