"""yunchang's LongContextAttention: an all-to-all of heads over some ranks, a ring over the others, in zigzag.

Its kernels know 16 bits alone. On CPU ranks flash_attn is this project's double (baselines/stand_ins): what is judged
is the exchange, not the kernel. `ring` has no all-to-all; `usp` has all-to-alls between two ranks. All-to-alls of all
ranks have a ring of one, which sends to itself; gloo cannot.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from typing import Any

import torch.distributed as dist
from torch import Tensor

from baselines.stand_ins import import_flash_attn_stand_in
from conform.positions import positions_of, put_together, take
from conform.target import CaseProblem, variant_of

VARIANTS = ("usp", "ring")
VARIANT = variant_of(__name__, VARIANTS)
NAME = f"yunchang {VARIANT}"
RANKS = (4, 8) if VARIANT == "usp" else (2, 4, 8)
DTYPE = "bf16"
REQUIRES = ("yunchang",)
INSTALL = "pip install --no-deps yunchang==0.6.4"
CAPABILITIES = ("causal", "grouped_heads", "batch", "bf16", "scale", "softcap", "window", "frozen", "two_models")
_ACROSS = 2 if VARIANT == "usp" else 1  # ranks of an all-to-all


def VERSION() -> str:
    return version("yunchang")


@lru_cache
def _attention(group: dist.ProcessGroup, rank: int, ranks: int, device: str) -> Any:
    import_flash_attn_stand_in(device)
    from yunchang import LongContextAttention, set_seq_parallel_pg
    from yunchang.kernels import AttnType

    set_seq_parallel_pg(_ACROSS, ranks // _ACROSS, rank, ranks)
    return LongContextAttention(ring_impl_type="zigzag", attn_type=AttnType.FA)


def _positions(problem: CaseProblem) -> list[Tensor]:
    """Zigzag over the rings; ranks of one all-to-all hold consecutive parts of their ring's tokens."""
    rings = problem.ranks // _ACROSS
    of_rings = [positions_of("zigzag", problem.tokens, ring, rings) for ring in range(rings)]
    return [of_rings[rank // _ACROSS].chunk(_ACROSS)[rank % _ACROSS] for rank in range(problem.ranks)]


def shard(whole: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return take(whole, dim, _positions(problem)[problem.rank])


def attention(q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, problem: CaseProblem) -> Tensor:
    assert problem.group is not None
    window = (-1, -1)
    if problem.window is not None:
        window = (problem.window, 0 if problem.mask == "causal" else -1)
    out_BLND: Tensor = _attention(problem.group, problem.rank, problem.ranks, problem.device)(
        q_BLND, k_BLKD, v_BLKD, softmax_scale=problem.scale, causal=problem.mask == "causal", window_size=window,
        softcap=problem.softcap or 0.0,
    )  # fmt: skip
    return out_BLND


def gather(part: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return put_together(part, dim, _positions(problem), problem)
