"""The native baselines of this project: other methods' attention around its kernels, one variant each."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from conform.target import CaseProblem, variant_of, version_of
from engine.attention.context import ContextParallel
from engine.settings import TrialSettings
from engine.shape import ModelShape

VARIANTS = ("ring", "megatron_cp", "ulysses", "loongtrain_double_ring", "loongtrain_usp", "torch_cp")
VARIANT = variant_of(__name__, VARIANTS)
NAME = f"native {VARIANT}"
RANKS = (1, 2, 4) if VARIANT in ("ulysses", "loongtrain_usp") else (1, 2, 4, 8)  # ranks divide the query heads
_COMMON = (
    *("causal", "full", "grouped_heads", "value_dim", "batch", "bf16", "fp64", "frozen", "two_models"),
    "deterministic",
)
_MASKS = () if VARIANT == "torch_cp" else ("documents", "window", "sinks")  # torch's own has none
_FEW = () if VARIANT in ("torch_cp", "loongtrain_usp") else ("few_kv_heads",)  # 2D-attention divides KV heads
CAPABILITIES = (*_COMMON, *_MASKS, *_FEW)


def VERSION() -> str:
    return version_of()


@lru_cache
def _method() -> Any:
    return importlib.import_module(f"baselines.{VARIANT}").METHOD


@lru_cache
def _settings(
    tokens: int, batch: int, heads: tuple[int, int, int], mask: str, sinks: bool, ranks: int, bf16: bool
) -> TrialSettings:
    """The problem as a trial. Raises ValueError where the method refuses it."""
    query_heads, kv_heads, head_dim = heads
    shape = ModelShape(
        name="conform", layers=1, hidden=query_heads * head_dim, ffn=64, heads=query_heads, kv_heads=kv_heads,
        head_dim=head_dim, vocab=256, sinks=sinks,
    )  # fmt: skip
    asked = TrialSettings(
        task="attention", method=VARIANT, model=shape, seq_len=tokens, batch_size=batch, cp_size=ranks,
        dtype="bf16" if bf16 else "fp32", mask=mask, deterministic=True,
    )  # fmt: skip
    if reason := _method().refuse(asked):
        raise ValueError(reason)
    return asked


def _settings_of(problem: CaseProblem) -> TrialSettings:
    mask = problem.mask
    if problem.documents or problem.window is not None:
        mask = f"documents:{','.join(map(str, problem.documents or (problem.tokens,)))}"
        mask += ":full" if problem.mask == "full" else ""
        mask += "" if problem.window is None else f":left-{problem.window}"
    heads = problem.heads, problem.kv_heads, problem.head_dim
    return _settings(problem.tokens, problem.batch, heads, mask, problem.sinks, problem.ranks, problem.dtype == "bf16")


@lru_cache
def _context(group: dist.ProcessGroup | None, ranks: int, layout: str) -> ContextParallel:
    return ContextParallel(group, layout=layout, node_size=max(1, ranks // 2))  # two nodes, for schedules of nodes


def _context_of(problem: CaseProblem) -> ContextParallel:
    return _context(problem.group, problem.ranks, _method().layout(_settings_of(problem)))


@lru_cache(maxsize=8)
def _attention(cp: ContextParallel, settings: TrialSettings) -> Any:
    return _method().attention(cp, settings)


def shard(whole: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return _context_of(problem).shard(whole, dim)


def attention(q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, problem: CaseProblem) -> Tensor:
    attend = _attention(_context_of(problem), _settings_of(problem))
    out_BLND: Tensor = attend(q_BLND, k_BLKD, v_BLKD, sinks_N=problem.sinks_N)[0]
    return out_BLND


def gather(part: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return _context_of(problem).unshard(part, dim)
