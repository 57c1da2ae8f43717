"""Shared by several kernels: reasons why a GPU kernel cannot run, and grouped heads repeated and summed.

KV heads are repeated locally, never before a transfer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.kernels import Problem
from engine.ops.autograd import accumulation_dtype


def gpu_unsupported_reason(kernel: str, capability: tuple[int, int]) -> str | None:
    """Why this machine has no GPU for `kernel`, or None. `capability` is the oldest compute capability that will do."""
    if not torch.cuda.is_available():
        return f"kernel {kernel} needs a CUDA GPU and torch sees none; choose kernel auto or cpu"
    found = torch.cuda.get_device_capability()
    if found < capability:
        return (
            f"kernel {kernel} needs compute capability {capability[0]}.{capability[1]} or newer, found "
            f"{found[0]}.{found[1]}; choose kernel auto"
        )
    return None


def half_precision_unsupported_reason(kernel: str, problem: Problem, max_head_dim: int) -> str | None:
    """Why a half-precision CUDA kernel cannot run the problem, or None."""
    if problem.device.type != "cuda":
        return f"kernel {kernel} runs on CUDA tensors, found {problem.device.type}; choose kernel auto"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"kernel {kernel} takes bf16 or fp16, found {problem.dtype}; choose kernel reference for {problem.dtype}"
    if problem.head_dim > max_head_dim or problem.head_dim % 8:
        return (
            f"kernel {kernel} takes head dims up to {max_head_dim} in multiples of 8, found {problem.head_dim}; "
            "choose kernel reference"
        )
    return None


def band_unsupported_reason(kernel: str, problem: Problem) -> str | None:
    """Why a kernel that knows only full and causal tiles cannot run the problem, or None."""
    if "band" in problem.bands:
        return f"kernel {kernel} knows full and causal tiles only and this mask needs windows; choose fa4 or reference"
    return None


def repeat_heads(kv_BMKD: Tensor, heads: int) -> Tensor:
    """KV heads repeated to `heads`: query head n reads KV head n // (N / K)."""
    groups = heads // kv_BMKD.shape[2]
    return kv_BMKD if groups == 1 else kv_BMKD.repeat_interleave(groups, dim=2)


def sum_heads(grad_BMND: Tensor, kv_heads: int) -> Tensor:
    """Gradients of repeated KV heads summed to `kv_heads` heads, in the accumulation dtype."""
    groups = grad_BMND.shape[2] // kv_heads
    if groups == 1:
        return grad_BMND
    return grad_BMND.to(accumulation_dtype(grad_BMND.dtype)).unflatten(2, (kv_heads, groups)).sum(dim=3)
