"""Products of layers in float8, with one scale for each operand, found from its values whenever it is used.

A matrix is stored as numbers of 8 bits and one `unit` in fp32: value = number x unit, where the unit makes the largest
absolute value the largest number of the format. Values of the forward pass are E4M3 (3 bits after the leading one,
448 at most), gradients E5M2 (2 bits, 57344 at most); arXiv:2209.05433 defines both. This is the recipe that torchao
calls tensorwise, Megatron-LM too: products in float8 by cuBLAS, forward with its fast accumulation.

cuBLAS takes the left operand by rows and the right one by columns, so dx needs W transposed and dW both operands. A
cast reads a matrix twice, once for its largest value, and writes what products ask for. No value is read on the host.

A matrix of zeros has zeros and a finite unit. One that holds NaN or infinity has a unit of NaN or infinity: all of its
products are NaN. Widths are multiples of 16 (`engine.settings.float8_unsupported_reason`); tokens are padded by zeros.

Tensors of the MLP's width are most of what is cast: SwiGLU's kernel finds the largest value of what it writes, and
kernels of its gradients and of norms write numbers alone.

Shape letters: T tokens, E features, F MLP width, R rows and C columns of a matrix, P rows with padding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from engine.ops import FLOAT8_CAPABILITY, FLOAT8_MULTIPLE
from engine.ops.autograd import kernels_for
from engine.ops.elementwise import swiglu
from engine.ops.norm import epsilon
from engine.ops.norm import kernels as norm_kernels
from engine.ops.products import Operand, Products

KERNELS = "engine.ops.float8_triton"
VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 2.0**-100  # largest absolute value below which a matrix is as good as zero: its unit stays a normal number


class Float8Products(Products):
    """Operands in float8, results in bf16, or fp32 for gradients of matrices where asked.

    Args:
        fast_gradients: whether the products of backward, too, add up in the fewer bits of the tensor cores' fast mode.
    """

    def __init__(self, *, fast_gradients: bool = False) -> None:
        self._fast = fast_gradients

    def operand(
        self,
        matrix_RC: Tensor,
        *,
        rows: bool = True,
        columns: bool = False,
        gradient: bool = False,
        known: tuple[Tensor, ...] = (),
    ) -> Operand:
        dtype = GRADIENTS if gradient else VALUES
        kernels = kernels_for(matrix_RC, KERNELS)
        if kernels is None:
            return Operand(*cast_by_torch(matrix_RC, dtype))
        return Operand(*kernels.cast(matrix_RC, dtype, rows=rows, columns=columns, known=known))

    def normed(
        self,
        x_TE: Tensor,
        weight_E: Tensor,
        eps: float | None,
        *,
        rows: bool = True,
        columns: bool = False,
        known: tuple[Tensor, ...] = (),
    ) -> Operand:
        kernels = norm_kernels(x_TE, KERNELS)
        if kernels is None:
            return super().normed(x_TE, weight_E, eps, rows=rows, columns=columns, known=known)
        eps = epsilon(x_TE, eps)
        return Operand(*kernels.norm(x_TE, weight_E, eps, VALUES, rows=rows, columns=columns, known=known))

    def add_normed(
        self, x_TE: Tensor, branch_TE: Tensor, weight_E: Tensor, eps: float | None, total_TE: Tensor
    ) -> Operand:
        kernels = norm_kernels(x_TE, KERNELS)
        if kernels is None:
            return super().add_normed(x_TE, branch_TE, weight_E, eps, total_TE)
        return Operand(*kernels.norm(x_TE, weight_E, epsilon(x_TE, eps), VALUES, added=(branch_TE, total_TE)))

    def swiglu(self, gate_TF: Tensor, up_TF: Tensor) -> Operand:
        if kernels_for(gate_TF, KERNELS) is None:
            return super().swiglu(gate_TF, up_TF)
        largest = torch.zeros((), dtype=torch.int32, device=gate_TF.device)
        return self.operand(swiglu(gate_TF, up_TF, largest), known=(largest,))

    def swiglu_again(
        self, dhidden_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, *, saved: bool
    ) -> tuple[Operand, Operand, Operand]:
        kernels = kernels_for(gate_TF, KERNELS)
        if kernels is None:
            return super().swiglu_again(dhidden_TF, gate_TF, up_TF, saved=saved)
        hidden, dgate, dup = kernels.swiglu_again(dhidden_TF, gate_TF, up_TF, VALUES, GRADIENTS)
        return Operand(*hidden), Operand(*dgate), Operand(*dup)

    def output(self, x: Operand, matrix: Operand) -> Tensor:
        return _multiply(x.rows_RC, matrix.rows_RC, x, matrix, fast=True)

    def input_gradient(self, dout: Operand, matrix: Operand, dx_TI: Tensor | None = None) -> Tensor:
        found_TI = _multiply(dout.rows_RC, matrix.columns_CR, dout, matrix, fast=self._fast)
        return found_TI if dx_TI is None else dx_TI.add_(found_TI)

    def weight_gradient(self, dout: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
        return _multiply(dout.columns_CR, x.columns_CR, dout, x, dtype, fast=self._fast)

    def add_weight_gradient(self, sum_OI: Tensor, dout: Operand, x: Operand) -> None:
        sum_OI += self.weight_gradient(dout, x, sum_OI.dtype)  # cuBLAS adds nothing to a sum of float8 products


def _multiply(
    left_MK: Tensor, right_NK: Tensor, left: Operand, right: Operand, dtype: torch.dtype = torch.bfloat16, *, fast: bool
) -> Tensor:
    """left @ right^T in `dtype`, times the units of the operands that both are part of."""
    if not left_MK.is_cuda:  # torch 2.11 has no such product on CPUs
        return (left_MK.float() @ right_NK.float().t() * left.unit * right.unit).to(dtype)
    whole: Any = ScalingType.TensorWise
    return F.scaled_mm(
        left_MK, right_NK.t(), left.unit, whole, right.unit, whole, output_dtype=dtype, use_fast_accum=fast
    )


def gpu_unsupported_reason() -> str | None:
    """Why this machine's GPU has no products in float8, or None."""
    major, minor = torch.cuda.get_device_capability()
    if major + minor / 10 >= FLOAT8_CAPABILITY:
        return None
    return (
        f"linear_dtype float8 needs compute capability {FLOAT8_CAPABILITY} or newer, found {major}.{minor}; "
        "set linear_dtype to same"
    )


def cast_by_torch(matrix_RC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers [R, C], numbers transposed and padded [C, P], unit); the reference implementation of
    `engine.ops.float8_triton.cast`."""
    most = torch.finfo(dtype).max
    largest = matrix_RC.abs().amax().float().clamp(min=SMALLEST)  # NaN stays NaN
    numbers_RC = (matrix_RC.float() * (most / largest)).clamp(-most, most)
    padding = -matrix_RC.shape[0] % FLOAT8_MULTIPLE
    return numbers_RC.to(dtype), F.pad(numbers_RC, (0, 0, 0, padding)).T.to(dtype).contiguous(), largest / most
