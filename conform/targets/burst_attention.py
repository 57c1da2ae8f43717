"""This package's attention, `schedule="auto"` and layout zigzag, for a function of the user's own."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import Tensor

import burst
from burst import ContextParallel
from conform.target import CaseProblem

NAME = "burst_attention"
RANKS = (1, 2, 4, 8)
CAPABILITIES = (
    *("causal", "full", "documents", "window", "sinks", "softcap", "scale", "grouped_heads", "few_kv_heads"),
    *("value_dim", "odd_lengths", "short", "batch", "bf16", "fp64", "deterministic", "checkpointing", "frozen"),
    "two_models",
)


def VERSION() -> str:
    return version("burst-harness")


@lru_cache(maxsize=4)
def _context(group: dist.ProcessGroup | None) -> ContextParallel:
    return ContextParallel(group)


def _added(problem: CaseProblem) -> int:
    """Tokens of padding at the end, a document of their own."""
    cp = _context(problem.group)
    return -problem.tokens % cp.layout.chunks(cp.size) if cp.size > 1 else 0


def shard(whole: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    if added := _added(problem):
        shape = [added if each == dim else size for each, size in enumerate(whole.shape)]
        whole = torch.cat((whole, whole.new_zeros(shape)), dim)
    return _context(problem.group).shard(whole, dim)


def attention(q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, problem: CaseProblem) -> Tensor:
    causal, added = problem.mask == "causal", _added(problem)
    lengths = problem.documents or (problem.tokens,)
    mask: burst.Mask = burst.Documents((*lengths, added) if added else lengths, causal=causal, left=problem.window)
    if len(lengths) == 1 and not added:
        mask = burst.Causal() if causal else burst.Full()
        if problem.window is not None:
            mask = burst.SlidingWindow(problem.window)
    out_BLND: Tensor = burst.burst_attention(
        q_BLND, k_BLKD, v_BLKD,
        mask=mask, cp=_context(problem.group), scale=problem.scale, softcap=problem.softcap, sinks_N=problem.sinks_N,
        deterministic=True, tensor_layout="BSHD",
    )  # fmt: skip
    return out_BLND


def gather(part: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return _context(problem.group).unshard(part, dim).narrow(dim, 0, problem.tokens)
