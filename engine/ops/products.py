"""The products of a layer with one of its matrices, as one object: in the dtype of their operands, or in float8.

With x [T, I], a matrix W [O, I] and the gradient dout [T, O]:

    out = x W^T        dx = dout W        dW = dout^T x

Each takes its operands as `Operand`s, which are made once where several products take one. Autograd functions of layers
ask such an object, so that there is one backward whatever the products are formed in.

Shape letters: T tokens, I inputs and O outputs of a matrix, F MLP width, R rows and C columns of any matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.autograd import refuse_second_derivative
from engine.ops.copies import computed, copy_of, joined, values_of
from engine.ops.elementwise import swiglu, swiglu_again
from engine.ops.norm import add_norm


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix [R, C] as products take it: as it is, and transposed, where these were asked for."""

    rows_RC: Tensor
    columns_CR: Tensor
    unit: Tensor | None = None  # what its numbers are multiplied by, 0-dim; None: they are as they should be
    known: tuple[Tensor, ...] = ()  # what another operand of the same matrix need not find again

    def first(self, rows: int) -> Operand:
        """Its first rows, as they are."""
        return replace(self, rows_RC=self.rows_RC[:rows])


class Products:
    """In the dtype of the operands."""

    def operand(
        self,
        matrix_RC: Tensor,
        *,
        rows: bool = True,
        columns: bool = False,
        gradient: bool = False,
        known: tuple[Tensor, ...] = (),
    ) -> Operand:
        """The matrix for products that take its `rows` (of x for out, of W for out, of dout for dx), its `columns` (of
        W for dx, of dout and x for dW) or both. `gradient`: it is a dout. `known`: of an operand of the same matrix."""
        return Operand(matrix_RC, matrix_RC.T)

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
        """RMSNorm of x."""
        normed_TE = F.rms_norm(x_TE, weight_E.shape, weight_E, eps)
        return self.operand(normed_TE, rows=rows, columns=columns, known=known)

    def add_normed(
        self, x_TE: Tensor, branch_TE: Tensor, weight_E: Tensor, eps: float | None, total_TE: Tensor
    ) -> Operand:
        """RMSNorm of x + branch, by rows; the sum is written into `total_TE`."""
        return self.operand(add_norm(x_TE, branch_TE, weight_E, eps, total_TE))

    def swiglu(self, gate_TF: Tensor, up_TF: Tensor) -> Operand:
        """silu(gate) x up, by rows."""
        return self.operand(swiglu(gate_TF, up_TF))

    def swiglu_again(
        self, dhidden_TF: Tensor, gate_TF: Tensor, up_TF: Tensor, *, saved: bool
    ) -> tuple[Operand, Operand, Operand]:
        """(hidden by columns, dgate, dup) of `engine.ops.elementwise.swiglu_again`."""
        hidden_TF, dgate_TF, dup_TF = swiglu_again(dhidden_TF, gate_TF, up_TF, saved=saved)
        hidden = self.operand(hidden_TF, rows=False, columns=True)
        dgate, dup = (self.operand(each, columns=True, gradient=True) for each in (dgate_TF, dup_TF))
        return hidden, dgate, dup

    def output(self, x: Operand, matrix: Operand) -> Tensor:
        """out_TO."""
        return F.linear(x.rows_RC, matrix.rows_RC)

    def input_gradient(self, dout: Operand, matrix: Operand, dx_TI: Tensor | None = None) -> Tensor:
        """dx_TI, or `dx_TI` with it added."""
        if dx_TI is None:
            return dout.rows_RC @ matrix.columns_CR.T
        return dx_TI.addmm_(dout.rows_RC, matrix.columns_CR.T)

    def weight_gradient(self, dout: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
        """dW_OI in `dtype`."""
        return product(dout.columns_CR, x.columns_CR.T, dtype)

    def add_weight_gradient(self, sum_OI: Tensor, dout: Operand, x: Operand) -> None:
        """Add it to a sum in the accumulation dtype."""
        add_product(sum_OI, dout.columns_CR.T, x.columns_CR.T)


PLAIN = Products()


def linear(x: Tensor, matrices_OI: list[Tensor], biases_O: Sequence[Tensor] = (), products: Products = PLAIN) -> Tensor:
    """`x @ matrix^T` of several matrices beside one another, as one product, and where given plus their biases.

    The gradient of a matrix that has a copy is formed in the matrix's own dtype. Plain products without a copy are left
    to torch.
    """
    bias_O = torch.cat([computed(bias) for bias in biases_O]) if biases_O else None
    if products is PLAIN and copy_of(matrices_OI[0]) is None:
        return F.linear(x, matrices_OI[0] if len(matrices_OI) == 1 else torch.cat(matrices_OI), bias_O)
    values_OI = map(values_of, matrices_OI)
    out_TO = _Linear.apply(x.flatten(0, -2), products, len(matrices_OI), *matrices_OI, *values_OI)
    # Before there is a view of it: backward of what is added to a view in place copies gradients four times.
    if bias_O is not None:
        out_TO.add_(bias_O)
    return out_TO if x.ndim == 2 else out_TO.unflatten(0, x.shape[:-1])


class _Linear(torch.autograd.Function):
    """(x_TI, how products are formed, number of matrices, matrices_OI, what is computed with for each) -> x @ W^T."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, products: Products, count: int, *matrices_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, *matrices_OI[count:])
        ctx.products, ctx.dtype, ctx.count = products, matrices_OI[0].dtype, count
        x, matrix = products.operand(x_TI), products.operand(joined(list(matrices_OI[count:])))
        ctx.known = x.known, matrix.known
        return products.output(x, matrix)

    @staticmethod
    def backward(ctx: Any, dout_TO: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("a product with copies of parameters")
        x_TI, *values_OI = ctx.saved_tensors
        products: Products = ctx.products
        of_x, of_matrices = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3 : 3 + ctx.count])
        dout = products.operand(dout_TO, rows=of_x, columns=of_matrices, gradient=True)
        dx_TI = None
        if of_x:
            matrix = products.operand(joined(values_OI), rows=False, columns=True, known=ctx.known[1])
            dx_TI = products.input_gradient(dout, matrix)
            del matrix
        gradients: tuple[Tensor | None, ...] = (None,) * ctx.count
        if of_matrices:
            x = products.operand(x_TI, rows=False, columns=True, known=ctx.known[0])
            whole_OI = products.weight_gradient(dout, x, ctx.dtype)
            gradients = whole_OI.split([value.shape[0] for value in values_OI])
        return dx_TI, None, None, *gradients, *(None for _ in values_OI)


def product(left_OT: Tensor, right_TI: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`: on GPUs the matmul writes its sums in it, without one more pass and rounding."""
    if left_OT.is_cuda and dtype != left_OT.dtype:
        return torch.ops.aten.mm.dtype(left_OT, right_TI, dtype)
    return (left_OT @ right_TI).to(dtype)


def add_product(dweight_OI: Tensor, dout_TO: Tensor, in_TI: Tensor) -> None:
    """dweight += dout^T @ in, summed in the dtype of `dweight`.

    That is fp32 for operands in bf16, so that many tiles are rounded once. T tokens of the tile, O outputs and I
    inputs of the weight.
    """
    if dweight_OI.dtype == in_TI.dtype:
        dweight_OI.addmm_(dout_TO.T, in_TI)
    elif in_TI.is_cuda:
        # bf16 operands, fp32 sum inside the matmul: no temporary of the weight's size, no bf16 rounding per tile.
        torch.ops.aten.addmm.dtype_out(dweight_OI, dout_TO.T, in_TI, dweight_OI.dtype, out=dweight_OI)
    else:
        dweight_OI += dout_TO.T @ in_TI
