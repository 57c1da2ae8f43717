"""DeepSpeed's Ulysses around torch's attention: DistributedAttention, or the UlyssesSPAttentionHF of ALST.

What it exchanges is heads and tokens; the mask is that of the attention inside, to which it gives whole sequences.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conform.positions import positions_of, put_together, take
from conform.target import CaseProblem, variant_of

VARIANTS = ("distributed", "ulysses_sp")
VARIANT = variant_of(__name__, VARIANTS)
NAME = f"DeepSpeed {'DistributedAttention' if VARIANT == 'distributed' else 'UlyssesSPAttentionHF'}"
RANKS = (2, 4)
REQUIRES = ("deepspeed", "einops")
INSTALL = "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed==0.19.8 einops==0.8.2"
CAPABILITIES = (
    "causal", "full", "documents", "window", "grouped_heads", "batch", "bf16", "fp64", "scale", "frozen",
    "two_models", "deterministic", *(("few_kv_heads",) if VARIANT == "ulysses_sp" else ()),
)  # fmt: skip


def VERSION() -> str:
    return version("deepspeed")


@lru_cache
def _visible(tokens: int, documents: tuple[int, ...], window: int | None, causal: bool) -> Tensor:
    """Whether a query sees a key, [S, S]."""
    document_S, place_S = (
        torch.arange(len(documents)).repeat_interleave(torch.tensor(documents)),
        torch.arange(tokens),
    )
    distance_SS = place_S[:, None] - place_S
    visible_SS = document_S[:, None] == document_S
    visible_SS &= (distance_SS >= 0) if causal else torch.ones_like(visible_SS)
    return visible_SS if window is None else visible_SS & (distance_SS <= window)


def _dense(q: Tensor, k: Tensor, v: Tensor, problem: CaseProblem) -> Tensor:
    """torch's attention of whole sequences: [B, heads, S, D] to [B, S, heads, D]."""
    lengths = problem.documents or (problem.tokens,)
    visible = _visible(problem.tokens, lengths, problem.window, problem.mask == "causal").to(q.device)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=problem.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def _positions(problem: CaseProblem) -> list[Tensor]:
    return [positions_of("contiguous", problem.tokens, rank, problem.ranks) for rank in range(problem.ranks)]


def shard(whole: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return take(whole, dim, _positions(problem)[problem.rank])


class _Local(torch.nn.Module):
    """Attention over the whole sequence with some of the heads, [B, S, heads, D]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, problem: CaseProblem) -> Tensor:
        return _dense(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), problem)


def _join() -> None:
    """Let DeepSpeed take over the process group that is there."""
    import deepspeed.comm
    import deepspeed.ops

    # An all-reduce for CPU ranks of one host, which is not part of Ulysses. It is compiled at first use, which may take
    # longer than a case, and a rank that is ended meanwhile leaves a lock that all later ranks wait for.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.comm.init_distributed()


@lru_cache
def _distributed(group: dist.ProcessGroup) -> Any:
    from deepspeed.sequence.layer import DistributedAttention

    _join()
    return DistributedAttention(_Local(), group, scatter_idx=2, gather_idx=1)


def _of_transformers(problem: CaseProblem) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    _join()

    def inner(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return _dense(q, k, v, problem).contiguous(), None

    return UlyssesSPAttentionHF(
        attn=inner, seq_length_is_variable=False, local_seq_length=problem.tokens // problem.ranks,
        global_seq_length=problem.tokens, batch_size=problem.batch, attn_head_count=problem.heads,
        kv_head_count=problem.kv_heads, num_hidden_layers=1, process_group=problem.group,
        attn_head_size=problem.head_dim,
    )  # fmt: skip


def attention(q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, problem: CaseProblem) -> Tensor:
    assert problem.group is not None
    if VARIANT == "distributed":
        out_BLND: Tensor = _distributed(problem.group)(q_BLND, k_BLKD, v_BLKD, 0, None, problem)
        return out_BLND
    q, k, v = (each.transpose(1, 2) for each in (q_BLND, k_BLKD, v_BLKD))
    own_BL = _positions(problem)[problem.rank].to(q.device).expand(problem.batch, -1).contiguous()
    out, _ = _of_transformers(problem)(torch.nn.Module(), q, k, v, None, position_ids=own_BL)
    return out.reshape(q_BLND.shape)


def gather(part: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return put_together(part, dim, _positions(problem), problem)
