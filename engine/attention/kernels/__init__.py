"""Attention kernels behind one interface: the forward and backward of one tile on one device.

A kernel sees a rectangle of queries and keys with a band of visible pairs (`engine.attention.geometry.tiles.Band`),
returns the partial output with its log-sum-exp, and computes gradients from the *final* log-sum-exp and delta =
rowsum(dO * O) of the whole row, less the gradient of the log-sum-exp: d lse / d score is the probability itself, so it
is subtracted from delta. O itself is never an input, so the backward ring does not send it. Kernels whose backward
needs O get the stand-in of `engine.attention.kernels.stand_in`.

Shape letters: B batch, L query tokens, M key tokens, N query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.attention.geometry.tiles import Band

# In order of preference for `auto`.
KERNELS = ("fa4", "cudnn", "fa2", "flex", "cpu", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The facts that decide whether a kernel can run; no tensors."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    bands: frozenset[str] = frozenset({"full"})  # kinds of band in its tiles: full, causal, band
    deterministic: bool = False


class BackwardInputs(NamedTuple):
    """Inputs of backward, query side first. `lse` and `delta` belong to whole rows, not to these keys alone."""

    q_BLND: Tensor
    dout_BLND: Tensor
    lse_BNL: Tensor
    delta_BNL: Tensor
    k_BMKD: Tensor
    v_BMKD: Tensor


class WholeInputs(NamedTuple):
    """Inputs of the backward of a tile that is a whole problem: its O is known, so the kernel forms delta itself."""

    q_BLND: Tensor
    out_BLND: Tensor
    dout_BLND: Tensor
    lse_BNL: Tensor
    k_BLKD: Tensor
    v_BLKD: Tensor

    def heads(self, queries: slice, keys: slice) -> WholeInputs:
        """The inputs of some query heads, and of the KV heads that they read."""
        q_BLND, out_BLND, dout_BLND, lse_BNL, k_BLKD, v_BLKD = self
        return WholeInputs(
            q_BLND[:, :, queries],
            out_BLND[:, :, queries],
            dout_BLND[:, :, queries],
            lse_BNL[:, queries],
            k_BLKD[:, :, keys],
            v_BLKD[:, :, keys],
        )


Gradients: TypeAlias = "tuple[Tensor, Tensor, Tensor]"  # dq_BLND, dk_BMKD, dv_BMKD


class Kernel(Protocol):
    """One implementation of tile attention."""

    @property
    def name(self) -> str: ...

    @property
    def writes_input_dtype(self) -> bool:
        """Gradients are in the inputs' dtype; else in fp32 or wider."""
        ...

    @property
    def takes_delta(self) -> bool:
        """Backward takes any delta; else only a rowsum(dO * O), because the kernel forms that itself."""
        ...

    @property
    def takes_output(self) -> bool:
        """`backward_of_whole` exists: where one tile is the whole problem, backward reads O and needs no delta."""
        ...

    def unsupported_reason(self) -> str | None:
        """One sentence why this machine cannot run the kernel at all, with the next step; None when it can."""
        ...

    def refuse(self, problem: Problem) -> str | None:
        """One sentence why the kernel cannot run this problem, or None."""
        ...

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Partial (out_BLND, lse_BNL) over these keys; lse: natural-log sum-exp of scaled scores, fp32 or wider."""
        ...

    def backward(self, given: BackwardInputs, band: Band, scale: float, deterministic: bool) -> Gradients:
        """Partial gradients over these queries and keys."""
        ...

    def backward_of_whole(self, given: WholeInputs, band: Band, scale: float, deterministic: bool) -> Gradients:
        """Gradients of a tile that is a whole problem, where the LSE has none. Called where `takes_output` says so."""
        ...


class Availability(NamedTuple):
    """One line of `burst doctor`."""

    name: str
    ok: bool
    sentence: str


def kernel_named(name: str) -> Kernel:
    """The kernel object of that name. Raises ValueError naming the known ones."""
    if name not in KERNELS:
        raise ValueError(f"kernel {name!r} is unknown; choose auto or one of {', '.join(KERNELS)}")
    kernel: Kernel = importlib.import_module(f"engine.attention.kernels.{name}").KERNEL
    return kernel


def unsupported_reason(kernel: Kernel, problem: Problem) -> str | None:
    """Why `kernel` cannot run `problem` on this machine, or None."""
    return kernel.unsupported_reason() or kernel.refuse(problem)


def choose_kernel(name: str, problem: Problem) -> Kernel:
    """The named kernel, or for `auto` the first of `KERNELS` that can run the problem.

    Raises ValueError with the kernel's own sentence when it cannot: there is no silent fallback.
    """
    if name != "auto":
        kernel = kernel_named(name)
        reason = unsupported_reason(kernel, problem)
        if reason:
            raise ValueError(reason)
        return kernel
    candidates = [kernel_named(candidate) for candidate in KERNELS]
    for kernel in candidates:
        if unsupported_reason(kernel, problem) is None:
            return kernel
    raise ValueError("; ".join(f"{kernel.name}: {unsupported_reason(kernel, problem)}" for kernel in candidates))


def available() -> list[Availability]:
    """Every kernel, whether this machine can run it, and why not."""
    lines = []
    for name in KERNELS:
        reason = kernel_named(name).unsupported_reason()
        lines.append(Availability(name, reason is None, reason or "ready"))
    return lines
