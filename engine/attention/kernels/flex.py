"""Kernel `flex`: torch's flex_attention (arXiv:2412.05496), compiled to Triton: any band on any GPU that bf16 runs on.

Its backward is autograd's own and knows only the tile: it divides by the tile's row sums, where a ring divides by
those of whole rows. The two differ by one factor per row, w = exp(lse of the tile - lse of the row) <= 1, which is
multiplied into the gradients given to the tile's backward. With dO' = w * dO, autograd forms
P (dO' V^T - rowsum(dO' * O) + dlse), and so

    dlse = rowsum(dO' * O) - w * delta     makes it     w * P (dO V^T - delta),

the gradient of the whole row; dV = P^T dO' follows. The forward of the tile runs again for it: about 1.4 x the time
of a backward that takes an outer LSE, in return for using nothing but torch's public interface.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from engine.attention.geometry.tiles import FULL, Band, VarlenGroup, Visible
from engine.attention.kernels import (
    BackwardInputs,
    Gradients,
    Kernel,
    KernelProblem,
    gpu_unsupported_reason,
    half_precision_unsupported_reason,
)
from engine.attention.kernels.sequences import backward_each, forward_each

BLOCK = 128  # tokens per side of the blocks that are skipped, masked, or computed without looking at the mask
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # q_BNLD, k_BKMD, v_BKMD -> out_BNLD, lse_BNL


# Graphs of one process: with and without gradients, each for lengths of one block and of several, for one size known to
# the compiler and then for any. Torch's limit of 8 is meant for models, and ends with an error here.
MAX_GRAPHS = 64


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    import torch._dynamo  # takes seconds, and processes that never run this kernel load this module too

    # fullgraph: a graph break is an error; eager flex_attention would hold all scores.
    compiled = torch.compile(flex_attention, fullgraph=True)

    def call(*tensors: Tensor, **options: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS):
            return compiled(*tensors, **options)

    return call


@lru_cache(maxsize=16)
def block_mask(band: Band, rows: int, columns: int, device: torch.device) -> BlockMask | None:
    """`band` as a block mask of flex; None when all pairs are visible."""
    if band == FULL:
        return None
    lo = -rows if band.lo is None else band.lo
    hi = columns if band.hi is None else band.hi
    # Tensors, not numbers: a captured number would be compiled in, and every window compiled anew.
    least, most = (torch.tensor(limit, dtype=torch.int32, device=device) for limit in (lo, hi))

    def visible(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column - row >= least) & (column - row <= most)

    first_row, first_column = torch.arange(0, rows, BLOCK)[:, None], torch.arange(0, columns, BLOCK)
    last_row, last_column = (first_row + BLOCK).clamp(max=rows) - 1, (first_column + BLOCK).clamp(max=columns) - 1
    lowest, highest = first_column - last_row, last_column - first_row
    some = (highest >= lo) & (lowest <= hi)
    whole = (last_row - first_row == BLOCK - 1) & (last_column - first_column == BLOCK - 1)
    every = (lowest >= lo) & (highest <= hi) & whole

    def listed(selected: Tensor) -> tuple[Tensor, Tensor]:
        """How many blocks of each row are selected, and their indices in front of all others."""
        indices = selected.int().argsort(dim=-1, descending=True, stable=True)
        return selected.sum(-1).int()[None, None].to(device), indices.int()[None, None].contiguous().to(device)

    return BlockMask.from_kv_blocks(
        *listed(some & ~every), *listed(every), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(rows, columns)
    )


def rescaled_backward(
    attend: Attend,
    dout_BNLD: Tensor,
    q_BNLD: Tensor,
    k_BKMD: Tensor,
    v_BKMD: Tensor,
    lse_BNL: Tensor,
    delta_BNL: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a tile whose rows have `lse` and `delta` in all, through autograd of the tile alone.

    `attend` is differentiable in its inputs by both of its outputs; `lse` is nowhere less than the tile's own.
    """
    inputs = tuple(tensor.detach().requires_grad_() for tensor in (q_BNLD, k_BKMD, v_BKMD))
    with torch.enable_grad():
        out_BNLD, part_lse_BNL = attend(*inputs)
    weight_BNL = (part_lse_BNL.detach() - lse_BNL).exp()
    scaled_BNLD = (dout_BNLD * weight_BNL.unsqueeze(-1)).to(dout_BNLD.dtype)
    dtype = part_lse_BNL.dtype
    dlse_BNL = (scaled_BNLD.to(dtype) * out_BNLD.detach().to(dtype)).sum(dim=-1) - weight_BNL * delta_BNL
    dq, dk, dv = torch.autograd.grad((out_BNLD, part_lse_BNL), inputs, (scaled_BNLD, dlse_BNL.to(dtype)))
    return dq, dk, dv


@dataclass(frozen=True)
class FlexKernel(Kernel):
    """torch.nn.attention.flex_attention, forward, and backward by `rescaled_backward`."""

    name = "flex"
    writes_input_dtype = True

    def unsupported_reason(self) -> str | None:
        unsupported_reason = gpu_unsupported_reason(self.name, (8, 0))
        if unsupported_reason is None and importlib.util.find_spec("triton") is None:
            return "kernel flex is compiled by Triton, which is not installed; pip install triton"
        return unsupported_reason

    def refuse(self, problem: KernelProblem) -> str | None:
        for dim in (problem.head_dim, problem.value_dim):
            if dim < 16 or dim & (dim - 1):
                return f"kernel flex takes head dims that are powers of 2 from 16 on, found {dim}; choose kernel auto"
        return half_precision_unsupported_reason(self.name, problem)

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, visible: Visible, scale: float
    ) -> tuple[Tensor, Tensor]:
        if isinstance(visible, VarlenGroup):
            return forward_each(self, q_BLND, k_BMKD, v_BMKD, visible, scale)
        attend = _attend(visible, q_BLND, k_BMKD, scale, self.softcap)
        out_BNLD, lse_BNL = attend(q_BLND.transpose(1, 2), k_BMKD.transpose(1, 2), v_BMKD.transpose(1, 2))
        return out_BNLD.transpose(1, 2), lse_BNL

    def backward(self, given: BackwardInputs, visible: Visible, scale: float, deterministic: bool) -> Gradients:
        if isinstance(visible, VarlenGroup):
            return backward_each(given, visible, lambda one, band: self.backward(one, band, scale, deterministic))
        q_BLND, dout_BLND, lse_BNL, delta_BNL, k_BMKD, v_BMKD = given
        # dQ and dK, dV are summed by programs of their own, without atomics: every run gives the same bits.
        dq_BNLD, dk_BKMD, dv_BKMD = rescaled_backward(
            _attend(visible, q_BLND, k_BMKD, scale, self.softcap),
            dout_BLND.transpose(1, 2),
            q_BLND.transpose(1, 2),
            k_BMKD.transpose(1, 2),
            v_BMKD.transpose(1, 2),
            lse_BNL,
            delta_BNL,
        )
        return dq_BNLD.transpose(1, 2), dk_BKMD.transpose(1, 2), dv_BKMD.transpose(1, 2)


@lru_cache(maxsize=16)
def capped_score(softcap: float, device: torch.device) -> Callable[..., Tensor]:
    """Soft-capping as a score_mod of flex, which gets scores that are scaled already."""
    most = torch.tensor(softcap, dtype=torch.float32, device=device)  # a tensor for the reason that limits of masks are

    def capped(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return most * torch.tanh(score / most)

    return capped


def _attend(band: Band, q_BLND: Tensor, k_BMKD: Tensor, scale: float, softcap: float | None) -> Attend:
    """flex_attention over one tile."""
    score_mod = None if softcap is None else capped_score(softcap, q_BLND.device)
    mask = block_mask(band, q_BLND.shape[1], k_BMKD.shape[1], q_BLND.device)
    grouped = q_BLND.shape[2] != k_BMKD.shape[2]

    def attend(q_BNLD: Tensor, k_BKMD: Tensor, v_BKMD: Tensor) -> tuple[Tensor, Tensor]:
        out_BNLD, auxiliary = _compiled()(
            q_BNLD,
            k_BKMD,
            v_BKMD,
            score_mod=score_mod,
            block_mask=mask,
            scale=scale,
            enable_gqa=grouped,
            return_aux=AuxRequest(lse=True),
            kernel_options={"BACKEND": "TRITON"},  # one kernel for all lengths, and not the one for decoding a few rows
        )
        return out_BNLD, auxiliary.lse

    return attend


KERNEL = FlexKernel()
