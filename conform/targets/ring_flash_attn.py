"""ring-flash-attention: its rings over rows of one length, and its gathering of keys for packed documents (llama3).

Its kernels know 16 bits alone. On CPU ranks flash_attn is this project's double (baselines/stand_ins): what is judged
is the ring, not the kernel. Its own page says that windows are not supported.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
import types
from importlib.metadata import version

import torch
from torch import Tensor

from baselines.stand_ins import import_flash_attn_stand_in
from conform.positions import positions_of, put_together, take
from conform.target import CaseProblem, variant_of

VARIANTS = ("zigzag", "plain", "striped", "llama3")
VARIANT = variant_of(__name__, VARIANTS)
NAME = f"ring-flash-attention {VARIANT}"
RANKS = (1, 2, 4, 8)
DTYPE = "bf16"
REQUIRES = ("ring_flash_attn",)
INSTALL = "pip install --no-deps ring-flash-attn==0.1.8"
_OF_VARIANT = {"zigzag": ("batch",), "plain": ("full", "batch"), "striped": ("batch",), "llama3": ("full", "documents")}
CAPABILITIES = (
    "causal", "grouped_heads", "few_kv_heads", "bf16", "scale", "frozen", "two_models", *_OF_VARIANT[VARIANT]
)  # fmt: skip
_LAYOUTS = {"zigzag": "zigzag", "plain": "contiguous", "striped": "striped", "llama3": "contiguous"}
_MODULES = {
    "zigzag": "zigzag_ring_flash_attn", "plain": "ring_flash_attn", "striped": "stripe_flash_attn",
    "llama3": "llama3_flash_attn_varlen",
}  # fmt: skip


def VERSION() -> str:
    return version("ring-flash-attn")


def _ring(device: str) -> types.ModuleType:
    """The module of the variant, past the package's adapter for transformers, which current ones break."""
    import_flash_attn_stand_in(device)
    if "ring_flash_attn" not in sys.modules:
        spec = importlib.util.find_spec("ring_flash_attn")
        assert spec is not None
        package = types.ModuleType("ring_flash_attn")
        package.__spec__, package.__path__ = spec, [os.path.dirname(str(spec.origin))]
        sys.modules["ring_flash_attn"] = package
    return importlib.import_module(f"ring_flash_attn.{_MODULES[VARIANT]}")


def _positions(problem: CaseProblem) -> list[Tensor]:
    layout = _LAYOUTS[VARIANT]
    return [positions_of(layout, problem.tokens, rank, problem.ranks) for rank in range(problem.ranks)]


def shard(whole: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return take(whole, dim, _positions(problem)[problem.rank])


def attention(q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, problem: CaseProblem) -> Tensor:
    module, causal = _ring(problem.device), problem.mask == "causal"
    settings = {"softmax_scale": problem.scale, "causal": causal, "group": problem.group}
    if VARIANT != "llama3":
        out_BLND: Tensor = getattr(module, f"{_MODULES[VARIANT]}_func")(q_BLND, k_BLKD, v_BLKD, **settings)
        return out_BLND
    ends = itertools.accumulate(problem.documents or (problem.tokens,), initial=0)
    bounds = torch.tensor(list(ends), dtype=torch.int32, device=q_BLND.device)
    found = module.llama3_flash_attn_prepare_cu_seqlens(bounds, causal, problem.rank, problem.ranks)
    bounds_q, bounds_k, longest_q, longest_k, keys = found
    out_LND: Tensor = module.llama3_flash_attn_varlen_func(
        q_BLND[0], k_BLKD[0], v_BLKD[0], bounds_q, bounds_k, longest_q, longest_k, heads_k_stride=1,
        local_k_slice=keys, **settings,
    )  # fmt: skip
    return out_LND[None]


def gather(part: Tensor, dim: int, problem: CaseProblem) -> Tensor:
    return put_together(part, dim, _positions(problem), problem)
