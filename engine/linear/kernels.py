"""The kernels of linear layers: flash-linear-attention's on GPUs where it is installed, else the forms in torch.

Only its public calls are used. They compute in 16 bits with states in fp32, so other dtypes are left to torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.linear.chunks import heads_of
from engine.linear.convolution import Convolution, shifted_sums
from engine.linear.gated_delta import DeltaRule, chunked_delta_rule
from engine.linear.mamba2 import StateSpace, chunked_state_space
from engine.linear.runs import COPIES, Runs
from engine.ops.copies import computed
from engine.ops.norm import RMSNorm, epsilon
from engine.shape import ModelShape

LIBRARY = "fla-core"  # the package that has the calls
OLDEST = (0, 6)  # 0.5 has the convolution elsewhere, and ignores `state_v_first` without an error
MOST_KEY_DIM = 256  # of its gated delta rule
DTYPES = (torch.bfloat16, torch.float16)


@cache
def refused_here() -> str:
    """Why the library's backward refuses this GPU, which it says itself after the first forward; empty: it does not."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return ""
    release = importlib.metadata.version("triton")
    wrong = (3, 4) <= tuple(map(int, re.findall(r"\d+", release)[:3])) < (3, 7, 1)
    if not wrong or importlib.util.find_spec("tilelang"):
        return ""
    return (
        f"Triton is {release}, with which flash-linear-attention's backward is wrong on this GPU (Hopper); "
        "pip install triton==3.7.1, or uninstall flash-linear-attention"
    )


@cache
def library_installed() -> bool:
    """Whether a release of flash-linear-attention with these calls is installed."""
    try:
        release = importlib.metadata.version(LIBRARY)
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, re.findall(r"\d+", release)[:2])) >= OLDEST


def kernel_of(device_type: str, dtype: torch.dtype) -> str:
    """The kernel on such a device in this dtype, as records name it: `fla` or `torch`."""
    return "fla" if device_type == "cuda" and dtype in DTYPES and library_installed() else "torch"


def linear_refused_on(device_type: str, dtype: torch.dtype, model: ModelShape) -> str | None:
    """Why the library cannot run the linear layers of a model on such a device, asked before it is called; or None."""
    if not any(model.linear_layers) or kernel_of(device_type, dtype) != "fla":
        return None
    if model.linear == "gated_delta_net" and model.linear_key_dim > MOST_KEY_DIM:
        return _too_wide(model.linear_key_dim)
    return refused_here() or None


def _too_wide(key_dim: int) -> str:
    return (
        f"linear_key_dim is {key_dim}, and flash-linear-attention takes at most {MOST_KEY_DIM} for gated delta nets; "
        "choose a smaller one, or uninstall the library"
    )


def delta_rule_for(tensor: Tensor) -> DeltaRule:
    """The gated delta rule for tensors like this one."""
    return _fla_delta_rule if kernel_of(tensor.device.type, tensor.dtype) == "fla" else chunked_delta_rule


def state_space_for(tensor: Tensor) -> StateSpace:
    """Mamba-2's recurrence for tensors like this one."""
    return _fla_state_space if kernel_of(tensor.device.type, tensor.dtype) == "fla" else chunked_state_space


def convolution_for(tensor: Tensor) -> Convolution:
    """The short convolution for tensors like this one."""
    return _fla_convolution if kernel_of(tensor.device.type, tensor.dtype) == "fla" else shifted_sums


def gated_norm(norm: RMSNorm, x_BLVP: Tensor, gate_BLVP: Tensor) -> Tensor:
    """norm(x) * silu(gate)."""
    if kernel_of(x_BLVP.device.type, x_BLVP.dtype) == "torch":
        normed: Tensor = norm(x_BLVP)
        return normed * F.silu(gate_BLVP)
    call = importlib.import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated
    gated: Tensor = call(x_BLVP, gate_BLVP, computed(norm.weight), None, eps=epsilon(x_BLVP, norm.eps))
    return gated


def _fla_delta_rule(
    q_BLHN: Tensor,
    k_BLHN: Tensor,
    v_BLVP: Tensor,
    decay_BLV: Tensor,
    beta_BLV: Tensor,
    runs: Runs,
    initial_BVNP: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if q_BLHN.shape[-1] > MOST_KEY_DIM:
        raise ValueError(_too_wide(q_BLHN.shape[-1]))
    named: dict[str, object] = {"use_qk_l2norm_in_kernel": True, "state_v_first": True}  # as in the library's layers
    call = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    initial_BVPN = None if initial_BVNP is None else initial_BVNP.mT
    tensors = {"q": q_BLHN, "k": k_BLHN, "v": v_BLVP, "g": decay_BLV, "beta": beta_BLV}
    out_BLVP, state_BVPN = _recurred(call, named, runs, initial_BVPN, **tensors)
    return out_BLVP, state_BVPN.mT


def _fla_state_space(
    q_BLHN: Tensor, k_BLHN: Tensor, v_BLVP: Tensor, decay_BLV: Tensor, runs: Runs
) -> tuple[Tensor, Tensor]:
    call = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    q, k = (heads_of(x_BLHN, v_BLVP.shape[2]) for x_BLHN in (q_BLHN, k_BLHN))
    return _recurred(call, {"scale": 1.0}, runs, None, q=q, k=k, v=v_BLVP, g=decay_BLV)


def _fla_convolution(x_BLC: Tensor, weight_CT: Tensor, bias_C: Tensor | None, runs: Runs) -> Tensor:
    call = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    return library_call(call, {"weight": weight_CT, "bias": bias_C, "activation": "silu"}, runs, x=x_BLC)[0]


@lru_cache(maxsize=COPIES)
def _bounds_on(runs: Runs, rows: int, device: torch.device) -> Tensor:
    """Where the runs of all rows, one row after the other, start, and where the last one ends."""
    starts = torch.tensor(runs.starts) + torch.arange(rows)[:, None] * runs.tokens
    return torch.cat([starts.flatten(), torch.tensor([rows * runs.tokens])]).to(device)


def _recurred(
    call: Any, named: dict[str, object], runs: Runs, initial: Tensor | None, **tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """Out, and the state after the last run. Raises ValueError where the library refuses its backward."""
    if reason := refused_here():
        raise ValueError(reason)
    rows, others = tensors["v"].shape[0], len(runs.starts) - 1
    if initial is not None and others:
        zeros = initial.new_zeros(rows, others, *initial.shape[1:])
        initial = torch.cat([initial[:, None], zeros], 1).flatten(0, 1)
    out, states = library_call(call, named | {"initial_state": initial, "output_final_state": True}, runs, **tensors)
    return out, states.unflatten(0, (rows, -1))[:, -1]


def library_call(
    call: Callable[..., tuple[Tensor, Tensor]], named: dict[str, object], runs: Runs, **tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """Both results of a call. Several runs are packed sequences, which the library takes, and gives, in one row."""
    if len(runs.starts) == 1:
        out, states = call(**tensors, **named)
        return out, states
    first = next(iter(tensors.values()))
    packed = {name: tensor.flatten(0, 1).unsqueeze(0) for name, tensor in tensors.items()}
    out, states = call(**packed, **named, cu_seqlens=_bounds_on(runs, len(first), first.device))
    return out.squeeze(0).unflatten(0, (len(first), -1)), states
