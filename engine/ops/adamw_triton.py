"""AdamW (arXiv:1711.05101) of one parameter as a Triton kernel: clipping, update and copy in one pass over memory.

Apart, clipping reads and writes every gradient and the copy reads every parameter: 12 of the 42 bytes that a parameter
in fp32 with a copy in bf16 then costs. The formulas and their order are those of torch's fused AdamW, in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of one program: 8 of each of the four tensors for each thread
WARPS = 4


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    parameter, gradient, exp_avg, exp_avg_sq, copy, scale, factors,
    elements, beta1, rest1, beta2, rest2, epsilon, decay,
    SCALED: tl.constexpr, COPIED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < elements
    p = tl.load(parameter + at, mask=live, other=0.0)
    g = tl.load(gradient + at, mask=live, other=0.0)
    m = tl.load(exp_avg + at, mask=live, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=live, other=0.0)
    if SCALED:
        g *= tl.load(scale)
    correction1 = tl.load(factors)
    root2 = tl.load(factors + 1)
    rate = tl.load(factors + 2)
    p -= rate * decay * p
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p -= rate / correction1 * m / (tl.sqrt(v) / root2 + epsilon)
    tl.store(parameter + at, p, mask=live)
    tl.store(exp_avg + at, m, mask=live)
    tl.store(exp_avg_sq + at, v, mask=live)
    if COPIED:
        tl.store(copy + at, p.to(copy.dtype.element_ty), mask=live)


def adamw(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    copy: Tensor | None,
    scale: Tensor | None,
    factors: Tensor,
    betas: tuple[float, float],
    epsilon: float,
    decay: float,
) -> None:
    """One update in place; `copy` is written, the gradient is read as multiplied by `scale`, and stays.

    All contiguous and in fp32, the copy in any dtype. `scale` has one element; `factors` has three: 1 - beta1^t, the
    root of 1 - beta2^t, where t counts this step, and the learning rate.
    """
    for tensor in (parameter, gradient, exp_avg, exp_avg_sq, *([] if copy is None else [copy])):
        assert tensor.is_contiguous()
    elements = parameter.numel()
    if elements:
        _adamw_kernel[(triton.cdiv(elements, BLOCK),)](
            parameter, gradient, exp_avg, exp_avg_sq, parameter if copy is None else copy,
            factors if scale is None else scale, factors,
            # 1 - beta formed here: from a beta rounded to fp32, 1 - 0.999 would be off by 1e-5.
            elements, betas[0], 1.0 - betas[0], betas[1], 1.0 - betas[1], epsilon, decay,
            SCALED=scale is not None, COPIED=copy is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
