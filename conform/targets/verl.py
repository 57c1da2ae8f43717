"""verl's Ulysses: the function that it puts in the place of flash attention in models of transformers.

Flash attention itself, which it calls with whole sequences and some of the heads, asks for a GPU; on CPU ranks torch's
dense attention answers in its place. What is judged is the exchange of heads and tokens.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from conform.positions import positions_of, put_together, take
from conform.target import CaseProblem

NAME = "verl Ulysses"
RANKS = (2, 4)
REQUIRES = ("verl", "tensordict", "codetiming", "hydra", "omegaconf", "antlr4", "pyvers", "cloudpickle", "orjson")
INSTALL = (
    "pip install --no-deps verl==0.9.1 tensordict==0.15.3 codetiming==1.4.0 hydra-core==1.3.8 omegaconf==2.4.0 "
    "antlr4-python3-runtime==4.9.3 pyvers==0.2.3 cloudpickle==3.1.3 orjson==3.13.0"
)
CAPABILITIES = (
    "causal", "full", "documents", "window", "grouped_heads", "few_kv_heads", "batch", "bf16", "fp64", "scale",
    "frozen", "two_models", "deterministic",
)  # fmt: skip


def VERSION() -> str:
    return version("verl")


def _positions(problem: CaseProblem) -> list[Tensor]:
    return [positions_of("contiguous", problem.tokens, rank, problem.ranks) for rank in range(problem.ranks)]


def shard(whole: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return take(whole, dim, _positions(problem)[problem.rank])


def attention(q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, problem: CaseProblem) -> Tensor:
    patch: Any = importlib.import_module("verl.models.transformers.monkey_patch")
    importlib.import_module("verl.utils.ulysses").set_ulysses_sequence_parallel_group(problem.group)
    lengths = problem.documents or (problem.tokens,)

    def flash(q: Tensor, k: Tensor, v: Tensor, _: Any, length: int, *, position_ids: Tensor, **__: Any) -> Tensor:
        """Dense attention of [B, S, heads, D]. Documents are read from positions, as flash attention's callers do."""
        document = (position_ids == 0).cumsum(1)[:, None]
        place = torch.arange(length, device=q.device)
        distance = place[:, None] - place
        visible = document.transpose(1, 2) == document
        visible &= (distance >= 0) if problem.mask == "causal" else torch.ones_like(visible)
        if problem.window is not None:
            visible &= distance <= problem.window
        out = torch.nn.functional.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, k, v)), attn_mask=visible[:, None], scale=problem.scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
        return out.transpose(1, 2)

    patch._flash_attention_forward = flash
    positions_S = torch.cat([torch.arange(length, device=q_BLND.device) for length in lengths])
    positions_BL = shard(positions_S.expand(problem.batch, -1), 1, problem).contiguous()
    out_BLND: Tensor = patch._ulysses_flash_attention_forward(
        q_BLND, k_BLKD, v_BLKD, None, q_BLND.shape[1], position_ids=positions_BL
    )
    return out_BLND


def gather(part: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return put_together(part, dim, _positions(problem), problem)
