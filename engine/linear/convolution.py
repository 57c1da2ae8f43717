"""The short causal convolution of every channel and its activation, over documents and ranks.

    y_t = silu(w_0 x_t + w_1 x_(t-1) + ... over the taps that are in the document of t)

A rank needs the last inputs, one fewer than taps, of the rank before; their gradient goes back to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.accumulate.accumulators import TensorSpec
from engine.attention.context import ContextParallel
from engine.linear.chunks import numbers_on
from engine.linear.runs import Runs
from engine.ops.autograd import refuse_second_derivative


class Convolution(Protocol):
    """The activated convolution on one rank: y_BLC. The last tap is that of the token itself; a run begins with zeros
    before it. Differentiable in all tensors."""

    def __call__(self, x_BLC: Tensor, weight_CT: Tensor, bias_C: Tensor | None, runs: Runs) -> Tensor: ...


def shifted_sums(x_BLC: Tensor, weight_CT: Tensor, bias_C: Tensor | None, runs: Runs) -> Tensor:
    """A `Convolution` of one product for each tap."""
    tokens, earlier = x_BLC.shape[1], weight_CT.shape[1] - 1
    padded_BMC = F.pad(x_BLC, (0, 0, earlier, 0))
    number_M = None  # all in one document
    if len(runs.starts) > 1:
        number_M = F.pad(numbers_on(runs, x_BLC.device), (earlier, 0))
    result = x_BLC * weight_CT[:, earlier]
    for back in range(1, earlier + 1):
        shifted = slice(earlier - back, earlier - back + tokens)
        part = padded_BMC[:, shifted] * weight_CT[:, earlier - back]
        if number_M is not None:
            part = part * (number_M[shifted] == number_M[earlier:])[:, None]
        result = result + part
    return F.silu(result if bias_C is None else result + bias_C)


def convolved(
    x_BLC: Tensor,
    weight_CT: Tensor,
    bias_C: Tensor | None,
    runs: Runs,
    cp: ContextParallel | None,
    convolution: Convolution = shifted_sums,
) -> Tensor:
    """The activated convolution of this rank's consecutive tokens.

    `cp` are the ranks that hold the others; None: there are none. Collective, and so is its backward.
    """
    earlier = weight_CT.shape[1] - 1
    if cp is None or earlier == 0:
        return convolution(x_BLC, weight_CT, bias_C, runs)
    padded_BMC = with_earlier(x_BLC, earlier, cp)
    # Zeros in front of a sequence are as good as its own tokens; those of the rank before may be another document's.
    runs = (runs if cp.rank > 0 else replace(runs, before=earlier)).after(earlier)
    return convolution(padded_BMC, weight_CT, bias_C, runs)[:, earlier:]


def with_earlier(x_BLC: Tensor, earlier: int, cp: ContextParallel) -> Tensor:
    """The shard behind the `earlier` tokens that precede it, zeros on the first rank. Collective, differentiable.

    Raises ValueError where a shard has fewer tokens than that.
    """
    if x_BLC.shape[1] < earlier:
        raise ValueError(
            f"a convolution of {earlier + 1} taps needs {earlier} tokens of the rank before, which holds "
            f"{x_BLC.shape[1]}; give longer sequences or a smaller cp_size"
        )
    return _WithEarlier.apply(x_BLC, earlier, cp)


class _WithEarlier(torch.autograd.Function):
    """(x_BLC, tokens before it, ranks) -> these tokens and x."""

    @staticmethod
    def forward(ctx: Any, x_BLC: Tensor, earlier: int, cp: ContextParallel) -> Tensor:
        ctx.earlier, ctx.cp = earlier, cp
        before = _from_neighbour(x_BLC[:, -earlier:], cp, 1)
        if before is None:
            before = x_BLC.new_zeros(x_BLC.shape[0], earlier, x_BLC.shape[2])
        return torch.cat([before, x_BLC], 1)

    @staticmethod
    def backward(ctx: Any, dpadded_BMC: Tensor) -> tuple[Tensor, None, None]:
        refuse_second_derivative("the short convolution", dpadded_BMC)
        earlier = ctx.earlier
        after = _from_neighbour(dpadded_BMC[:, :earlier], ctx.cp, -1)
        dx_BLC = dpadded_BMC[:, earlier:]
        if after is not None:
            dx_BLC = dx_BLC.clone()
            dx_BLC[:, -earlier:] += after
        return dx_BLC, None, None


def _from_neighbour(sent: Tensor, cp: ContextParallel, step: int) -> Tensor | None:
    """Send to rank + `step`, receive from rank - `step`; None where there is no such rank."""
    to, source = cp.rank + step, cp.rank - step
    specs = (TensorSpec(tuple(sent.shape), sent.dtype),)
    with cp.comms.collective():
        transfer = cp.comms.linear().start(
            (sent,) if 0 <= to < cp.size else (),
            to % cp.size,
            specs if 0 <= source < cp.size else (),
            source % cp.size,
        )
        arrived = transfer.wait()
    return arrived[0] if arrived else None
