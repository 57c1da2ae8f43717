"""Parts of computing over runs of tokens: the length of a run, a recomputed norm, the sum of a weight's gradient.

Tiling of token-wise parts as in ALST (arXiv:2506.13996). Shape letters: T tokens of a run, E features, O outputs and
I inputs of a weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from engine.ops import RECOMPUTE
from engine.ops.autograd import accumulation_dtype
from engine.ops.copies import product
from engine.ops.norm import MAX_ELEMENTS, norm_gradients


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
        with torch.no_grad(), record_function(RECOMPUTE):
            self.normed_TE = F.rms_norm(x_TE, weight_E.shape, weight_E, eps)

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


class WeightGradient:
    """The gradient of a matrix, summed over runs of tokens by `add_product` and rounded once.

    The first run's product is written, where adding it to zeros would read and write the sum once more. A single run's
    is formed in the dtype of the gradient: the matmul itself sums in fp32 and rounds once. A gradient in fp32, that of
    a parameter with a copy in the operands' dtype (`engine.ops.copies`), is the sum itself: no pass rounds it.
    """

    def __init__(self, dtype: torch.dtype, *, single: bool) -> None:
        """`dtype`: of the gradient. `single`: there will be one run."""
        self._dtype, self._single = dtype, single
        self._sum_OI: Tensor | None = None

    def add(self, dout_TO: Tensor, in_TI: Tensor) -> None:
        """Add dout^T @ in: T tokens of the run, O outputs and I inputs of the matrix."""
        if self._sum_OI is not None:
            add_product(self._sum_OI, dout_TO, in_TI)
            return
        dtype = self._dtype if self._single else accumulation_dtype(in_TI.dtype)
        self._sum_OI = product(dout_TO.T, in_TI, dtype)

    def rounded(self) -> Tensor:
        """The gradient, after the last run."""
        assert self._sum_OI is not None, "no run has added its product"
        return self._sum_OI.to(self._dtype)
