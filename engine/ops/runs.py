"""Parts of computing over runs of tokens: the length of a run, a recomputed norm, the sum of a weight's gradient.

Tiling of token-wise parts as in ALST (arXiv:2506.13996). Shape letters: T tokens of a run, E features, O outputs and
I inputs of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.profiler import record_function

from engine.ops import RECOMPUTE
from engine.ops.autograd import accumulation_dtype
from engine.ops.norm import MAX_ELEMENTS, norm_gradients
from engine.ops.products import Operand, Products


def run_length(tokens: int, features: int, tiles: int) -> int:
    """Tokens of a run when `tokens` of them go in `tiles` runs: ceil(tokens / tiles), fewer where a norm takes no
    more at once (engine.ops.norm)."""
    return max(1, min(-(-tokens // tiles), MAX_ELEMENTS // features))


def runs(length: int, size: int) -> Iterator[slice]:
    """0 .. length in runs of `size`, the last one shorter."""
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def zeros_for_sum(weight: Tensor) -> Tensor:
    """Zeros to sum a weight's gradient over the runs in: accumulation dtype, rounded to the weight's dtype once."""
    return torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))


class RecomputedNorm:
    """RMSNorm of one run, computed again in backward.

    Args:
        x_TE: the run's input.
        weight_E: the norm's weight, outside any graph.
        eps: the norm's epsilon.
    """

    def __init__(self, x_TE: Tensor, weight_E: Tensor, eps: float | None) -> None:
        self._x_TE, self._weight_E, self._eps = x_TE, weight_E, eps

    def normed(self, products: Products, *, rows: bool, known: tuple[Tensor, ...]) -> Operand:
        """The result for the gradient of a matrix, and with `rows` for its product again; `known` of the first one."""
        with torch.no_grad(), record_function(RECOMPUTE):
            return products.normed(self._x_TE, self._weight_E, self._eps, rows=rows, columns=True, known=known)

    def gradient(
        self,
        dnormed_TE: Tensor,
        dweight_E: Tensor,
        *,
        residual_TE: Tensor | None = None,
        dx_TE: Tensor | None = None,
    ) -> Tensor:
        """The gradient of the run's input, plus `residual_TE`, in `dx_TE` where given; that of the weight is added to
        `dweight_E`."""
        dx_TE, dweight_run_E = norm_gradients(
            self._x_TE, self._weight_E, self._eps, dnormed_TE, residual_TE=residual_TE, dx_TE=dx_TE
        )
        dweight_E += dweight_run_E
        return dx_TE


class WeightGradient:
    """The gradient of a matrix, summed over runs of tokens and rounded once.

    The first run's product is written, where adding it to zeros would read and write the sum once more. A single run's
    is formed in the dtype of the gradient: the matmul itself sums in fp32 and rounds once. A gradient in fp32, that of
    a parameter with a copy in the operands' dtype (`engine.ops.copies`), is the sum itself: no pass rounds it.
    """

    def __init__(self, products: Products, matrix_OI: Tensor, dtype: torch.dtype, *, single: bool) -> None:
        """`matrix_OI`: what is computed with. `dtype`: of the gradient. `single`: there will be one run."""
        self._products = products
        self._dtype = dtype
        self._first_dtype = dtype if single else accumulation_dtype(matrix_OI.dtype)
        self._sum_OI: Tensor | None = None

    def add(self, dout: Operand, x: Operand) -> None:
        """Add dout^T @ x of a run, by their columns."""
        if self._sum_OI is None:
            self._sum_OI = self._products.weight_gradient(dout, x, self._first_dtype)
        else:
            self._products.add_weight_gradient(self._sum_OI, dout, x)

    def rounded(self) -> Tensor:
        """The gradient, after the last run."""
        assert self._sum_OI is not None, "no run has added its product"
        return self._sum_OI.to(self._dtype)
