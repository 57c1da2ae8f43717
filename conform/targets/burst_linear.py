"""This package's linear layers over ranks: tokens in layout zigzag, moved to consecutive ones and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from burst import Documents
from conform.context import added_tokens, context_of, padded_part, unpadded_whole
from conform.target import CaseProblem, version_of
from engine.linear.shard import Mix

NAME = "burst linear layers"
RANKS = (1, 2, 4, 8)
CAPABILITIES = (
    *("gated_delta_net", "mamba2", "documents", "grouped_heads", "few_kv_heads", "value_dim", "odd_lengths", "short"),
    *("batch", "bf16", "fp64", "deterministic", "frozen", "two_models", "bytes"),
)


def VERSION() -> str:
    return version_of()


def shard(whole: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return padded_part(whole, dim, problem)


def recurrence(
    q_BLHN: Tensor, k_BLHN: Tensor, v_BLVP: Tensor, decay_BLV: Tensor, beta_BLV: Tensor | None, problem: CaseProblem
) -> Tensor:
    inputs = [q_BLHN, k_BLHN, v_BLVP, decay_BLV, *([] if beta_BLV is None else [beta_BLV])]
    widths = [each[0, 0].numel() for each in inputs]

    def mixer(x_BLE: Tensor, part: Any) -> Tensor:
        """One tensor moves between the ranks, in the dtype of the gates, which is the widest."""
        parts = x_BLE.split(widths, -1)
        q, k, v, decay, *beta = (
            each.unflatten(2, old.shape[2:]).to(old.dtype) for each, old in zip(parts, inputs, strict=True)
        )
        return part.recurrence(q, k, v, decay, *beta).flatten(2)

    lengths = (*(problem.documents or (problem.tokens,)), *([added] if (added := added_tokens(problem)) else []))
    documents = Documents(lengths) if len(lengths) > 1 else None
    x_BLE = torch.cat([each.flatten(2).to(decay_BLV.dtype) for each in inputs], -1)
    mix = Mix(context_of(problem.group), documents)
    out_BLE = mix.leave(mix(mixer, mix.enter(x_BLE)))
    return out_BLE.unflatten(2, v_BLVP.shape[2:])


def gather(part: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return unpadded_whole(part, dim, problem)


def sent_bytes(problem: CaseProblem) -> int:
    """Inputs and output moved, gradients moved back, and a map with a state in each round of both scans, in float32."""
    if problem.ranks == 1:
        return 0
    tokens = problem.batch * (problem.tokens + added_tokens(problem)) // problem.ranks
    key, value = problem.head_dim, problem.value_dim or problem.head_dim
    gates = 2 if problem.recurrence == "gated_delta_net" else 1
    features = 2 * problem.kv_heads * key + problem.heads * (2 * value + gates)
    state = problem.batch * problem.heads * key * (value + key)
    return 4 * 2 * (tokens * features + (problem.ranks - 1).bit_length() * state)
