"""Attention kernels behind one interface: the forward and backward of one call on one device.

A kernel sees a rectangle of queries and keys with a band of visible pairs (`engine.attention.geometry.tiles.Band`), or
many of them that follow each other (`VarlenGroup`, of packed documents), returns the partial output with its
log-sum-exp, and computes gradients from the *final* log-sum-exp and delta = rowsum(dO * O) of the whole row, less the
gradient of the log-sum-exp: d lse / d score is the probability itself, so it is subtracted from delta. O itself is
never an input, so the backward ring does not send it. Kernels whose backward needs O get the stand-in of
`engine.attention.kernels.stand_in`.

Scores are q k^T * scale, or with soft-capping softcap * tanh(q k^T * scale / softcap) (Gemma 2, arXiv:2408.00118).
A kernel object has the soft-capping of its calls: `choose_kernel` returns one that was made for the problem.

Q and K have one head dim, V, O and dO may have another (192 and 128 in DeepSeek-V3). A kernel whose operation wants
one for all gets zeros up to the wider one (`engine.attention.kernels.padded`).

Shape letters: B batch, L query tokens, M key tokens, N query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from engine.attention.geometry.tiles import Visible
from engine.combinations import head_dim_unsupported_reason
from engine.ops.autograd import accumulation_dtype

# In order of preference for `auto`.
KERNELS = ("fa4", "cudnn", "fa2", "flex", "cpu", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProblem:
    """The facts that decide whether a kernel can run; no tensors."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int  # of Q and K
    bands: frozenset[str] = frozenset({"full"})  # kinds of band in its tiles: full, causal, band
    deterministic: bool = False
    softcap: float | None = None  # bound of the scores' size; None: scores as they are
    sequences: bool = False  # some calls are of several sequences
    any_delta: bool = False  # delta may be any number; else only a rowsum(dO * O), as where the LSE has no gradient
    value_dim: int = 0  # of V and O; 0: as `head_dim`

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_dim", self.value_dim or self.head_dim)


class BackwardInputs(NamedTuple):
    """Inputs of backward, query side first. `lse` and `delta` belong to whole rows, not to these keys alone."""

    q_BLND: Tensor
    dout_BLND: Tensor
    lse_BNL: Tensor
    delta_BNL: Tensor
    k_BMKD: Tensor
    v_BMKD: Tensor

    def tokens(self, queries: slice, keys: slice) -> BackwardInputs:
        """The inputs of some queries and some keys."""
        q_BLND, dout_BLND, lse_BNL, delta_BNL, k_BMKD, v_BMKD = self
        rows = q_BLND[:, queries], dout_BLND[:, queries], lse_BNL[:, :, queries], delta_BNL[:, :, queries]
        return BackwardInputs(*rows, k_BMKD[:, keys], v_BMKD[:, keys])


class WholeInputs(NamedTuple):
    """Inputs of the backward of a call that is a whole problem: its O is known, so the kernel forms delta itself."""

    q_BLND: Tensor
    out_BLND: Tensor
    dout_BLND: Tensor
    lse_BNL: Tensor
    k_BLKD: Tensor
    v_BLKD: Tensor

    def tokens(self, queries: slice, keys: slice) -> WholeInputs:
        """The inputs of some queries and some keys."""
        q_BLND, out_BLND, dout_BLND, lse_BNL, k_BLKD, v_BLKD = self
        rows = q_BLND[:, queries], out_BLND[:, queries], dout_BLND[:, queries], lse_BNL[:, :, queries]
        return WholeInputs(*rows, k_BLKD[:, keys], v_BLKD[:, keys])

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


Gradients: TypeAlias = tuple[Tensor, Tensor, Tensor]  # dq_BLND, dk_BMKD, dv_BMKD


@dataclass(frozen=True)
class Kernel:
    """One implementation of attention over the keys of one call; a subclass computes. Queries between the sequences of
    a call give out 0, lse -inf and no gradient. A kernel without a call for several sequences computes them one after
    another (`engine.attention.kernels.sequences`)."""

    softcap: float | None = None
    takes_delta: bool = True  # backward takes any delta; else only a rowsum(dO * O)

    name: ClassVar[str]
    writes_input_dtype: ClassVar[bool]  # gradients are in the inputs' dtype; else in fp32 or wider
    takes_sequences: ClassVar[bool] = False  # in one call; else one after another
    # `backward_of_whole` exists: where one call is the whole problem, backward reads O and needs no delta.
    takes_output: ClassVar[bool] = False

    def made_for(self, problem: KernelProblem) -> Kernel:
        """This kernel with the soft-capping of `problem`, and for any delta where it asks for that."""
        return replace(self, softcap=problem.softcap, takes_delta=self.takes_delta or problem.any_delta)

    def unsupported_reason(self) -> str | None:
        """One sentence why this machine cannot run the kernel at all, with the next step; None when it can."""
        return None

    def refuse(self, problem: KernelProblem) -> str | None:
        """One sentence why the kernel cannot run this problem, or None."""
        raise NotImplementedError

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, visible: Visible, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Partial (out_BLND, lse_BNL) over these keys; lse: natural-log sum-exp of the scores, fp32 or wider."""
        raise NotImplementedError

    def backward(self, given: BackwardInputs, visible: Visible, scale: float, deterministic: bool) -> Gradients:
        """Partial gradients over these queries and keys."""
        raise NotImplementedError

    def backward_of_whole(self, given: WholeInputs, visible: Visible, scale: float, deterministic: bool) -> Gradients:
        """Gradients of a call that is a whole problem, where the LSE has none. Called where `takes_output` says so."""
        raise NotImplementedError


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


def unsupported_reason(kernel: Kernel, problem: KernelProblem) -> str | None:
    """Why `kernel` cannot run `problem` on this machine, or None."""
    return kernel.unsupported_reason() or kernel.refuse(problem)


def choose_kernel(name: str, problem: KernelProblem) -> Kernel:
    """The named kernel, or for `auto` the first of `KERNELS` that can run the problem; for a problem of several
    sequences the first that takes them in one call, if one can.

    It is made for the problem: with its soft-capping. Raises ValueError with the kernel's own sentence when it cannot
    run: there is no silent fallback.
    """
    if name != "auto":
        kernel = kernel_named(name)
        reason = unsupported_reason(kernel, problem)
        if reason:
            raise ValueError(reason)
        return kernel.made_for(problem)
    candidates = [kernel_named(candidate) for candidate in KERNELS]
    for kernel in sorted(candidates, key=lambda kernel: problem.sequences and not kernel.takes_sequences):
        if unsupported_reason(kernel, problem) is None:
            return kernel.made_for(problem)
    raise ValueError("; ".join(f"{kernel.name}: {unsupported_reason(kernel, problem)}" for kernel in candidates))


def available() -> list[Availability]:
    """Every kernel, whether this machine can run it, and why not."""
    lines = []
    for name in KERNELS:
        reason = kernel_named(name).unsupported_reason()
        lines.append(Availability(name, reason is None, reason or "ready"))
    return lines


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


def half_precision_unsupported_reason(kernel: str, problem: KernelProblem) -> str | None:
    """Why a half-precision CUDA kernel cannot run the problem, or None."""
    if problem.device.type != "cuda":
        return f"kernel {kernel} runs on CUDA tensors, found {problem.device.type}; choose kernel auto"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"kernel {kernel} takes bf16 or fp16, found {problem.dtype}; choose kernel reference for {problem.dtype}"
    return head_dim_unsupported_reason(kernel, problem.head_dim, problem.value_dim)


def torch_op_unsupported_reason(kernel: str, problem: KernelProblem) -> str | None:
    """Why a kernel that knows only full and causal tiles, without soft-capping, cannot run the problem, or None."""
    if problem.softcap is not None:
        return softcap_unsupported_reason(kernel)
    if "band" in problem.bands:
        return f"kernel {kernel} knows full and causal tiles only and this mask needs windows; choose fa4 or reference"
    return None


def softcap_unsupported_reason(kernel: str) -> str:
    """The sentence of a kernel whose operation has no soft-capping."""
    return f"kernel {kernel} is an operation of torch without soft-capping; choose fa4, flex, reference or auto"


def repeat_heads(kv_BMKD: Tensor, heads: int) -> Tensor:
    """KV heads repeated to `heads`: query head n reads KV head n // (N / K)."""
    groups = heads // kv_BMKD.shape[2]
    return kv_BMKD if groups == 1 else kv_BMKD.repeat_interleave(groups, dim=2)


def heads_first(tensor_BLND: Tensor) -> Tensor:
    """[B, tokens, heads, D] as [B, heads, tokens, D] in the accumulation dtype."""
    return tensor_BLND.to(accumulation_dtype(tensor_BLND.dtype)).transpose(1, 2)


def sum_heads(grad_BMND: Tensor, kv_heads: int) -> Tensor:
    """Gradients of repeated KV heads summed to `kv_heads` heads, in the accumulation dtype."""
    groups = grad_BMND.shape[2] // kv_heads
    if groups == 1:
        return grad_BMND
    return grad_BMND.to(accumulation_dtype(grad_BMND.dtype)).unflatten(2, (kv_heads, groups)).sum(dim=3)
