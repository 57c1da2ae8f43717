"""This package's attention, `schedule="auto"` and layout zigzag, for a function of the user's own."""

from __future__ import annotations

from torch import Tensor

import burst
from conform.context import added_tokens, context_of, padded_part, unpadded_whole
from conform.target import CaseProblem, version_of

NAME = "burst_attention"
RANKS = (1, 2, 4, 8)
CAPABILITIES = (
    *("causal", "full", "documents", "window", "sinks", "softcap", "scale", "grouped_heads", "few_kv_heads"),
    *("value_dim", "odd_lengths", "short", "batch", "bf16", "fp64", "deterministic", "checkpointing", "frozen"),
    "two_models",
)


def VERSION() -> str:
    return version_of()


def shard(whole: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return padded_part(whole, dim, problem)


def attention(q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, problem: CaseProblem) -> Tensor:
    causal, added = problem.mask == "causal", added_tokens(problem)
    lengths = problem.documents or (problem.tokens,)
    mask: burst.Mask = burst.Documents((*lengths, added) if added else lengths, causal=causal, left=problem.window)
    if len(lengths) == 1 and not added:
        mask = burst.Causal() if causal else burst.Full()
        if problem.window is not None:
            mask = burst.SlidingWindow(problem.window)
    out_BLND: Tensor = burst.burst_attention(
        q_BLND, k_BLKD, v_BLKD,
        mask=mask, cp=context_of(problem.group), scale=problem.scale, softcap=problem.softcap, sinks_N=problem.sinks_N,
        deterministic=True, tensor_layout="BSHD",
    )  # fmt: skip
    return out_BLND


def gather(part: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return unpadded_whole(part, dim, problem)
