"""Stand-ins with the signatures of flash-linear-attention's public calls; each sequence is computed alone in torch."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.linear import kernels
from engine.linear.convolution import shifted_sums
from engine.linear.gated_delta import chunked_delta_rule
from engine.linear.mamba2 import chunked_state_space
from engine.linear.runs import Runs
from engine.ops.autograd import accumulation_dtype


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert use_qk_l2norm_in_kernel
    assert state_v_first
    assert scale is None
    initial = None if initial_state is None else initial_state.mT
    out, states = sequences(chunked_delta_rule, initial, cu_seqlens, q, k, v, g, beta)
    return out, states.mT


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert q.shape[2] == v.shape[2]
    assert scale == 1.0
    assert g_gamma is None
    assert initial_state is None
    return sequences(chunked_state_space, initial_state, cu_seqlens, q, k, v, g)


def causal_conv1d(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, residual: Tensor | None = None,
    initial_state: Tensor | None = None, output_final_state: bool | None = False, activation: str | None = None,
    backend: str | None = "triton", cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    assert activation == "silu"
    assert weight is not None

    def form(part: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
        return shifted_sums(part, weight, bias, runs), part[:, :0]

    return sequences(form, None, cu_seqlens, x)[0], None


def rms_norm_gated(
    x: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "swish",
    residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    assert bias is None
    return F.rms_norm(x, weight.shape, weight, eps) * F.silu(g)


def sequences(
    form: Callable[..., tuple[Tensor, Tensor]], initial_state: Tensor | None, cu_seqlens: Tensor | None, *tensors: Any
) -> tuple[Tensor, Tensor]:
    """Every sequence alone, with its own state."""
    if cu_seqlens is None:
        runs = Runs(tokens=tensors[0].shape[1])
        return form(*tensors, runs) if initial_state is None else form(*tensors, runs, initial_state)
    assert len(tensors[0]) == 1, "packed sequences are one row"
    outs, states = [], []
    for number, (start, stop) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        initial = () if initial_state is None else (initial_state[number : number + 1],)
        out, state = form(*(tensor[:, start:stop] for tensor in tensors), Runs(tokens=stop - start), *initial)
        outs.append(out)
        states.append(state)
    return torch.cat(outs, 1), torch.cat(states)


CALLS: dict[str, Callable[..., Any]] = {
    "ops.gated_delta_rule": chunk_gated_delta_rule,
    "ops.simple_gla": chunk_simple_gla,
    "modules.causal_conv1d": causal_conv1d,
    "modules.norm.fused_norm_gate": rms_norm_gated,
}


def install(patch: pytest.MonkeyPatch, *, with_state: bool = True) -> None:
    """The calls run for every device and dtype. `with_state`: recurrences are asked for their last state, and may be
    given the first; else neither."""

    def asked(call: Callable[..., Any], **named: Any) -> Any:
        assert named["g"].dtype == accumulation_dtype(named["v"].dtype)
        assert named.get("output_final_state", False) is with_state
        assert with_state or named.get("initial_state") is None
        out, states = call(**named)
        return out, states if with_state else None

    for name, call in CALLS.items():
        given = partial(asked, call) if name.startswith("ops.") else call
        patch.setitem(sys.modules, f"fla.{name}", SimpleNamespace(**{call.__name__: given}))
    patch.setattr(kernels, "kernel_of", lambda *_: "fla")
