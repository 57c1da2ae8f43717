"""The kernels of the recurrences: flash-linear-attention's on GPUs where it is installed, else the chunked forms in
torch.

Only its public calls are used. They compute in 16 bits with states in fp32, so other dtypes are left to torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from engine.linear.chunks import heads_of
from engine.linear.gated_delta import DeltaRule, chunked_delta_rule, gated_delta
from engine.linear.mamba2 import StateSpace, chunked_state_space, state_space
from engine.linear.runs import COPIES, Runs
from engine.linear.shard import LinearShard, Recurrence

LIBRARY = "fla-core"  # the package that has the calls
OLDEST = (0, 6)  # earlier releases do not know `state_v_first`, and ignore it without an error
DTYPES = (torch.bfloat16, torch.float16)


@cache
def library_installed() -> bool:
    """Whether a release of flash-linear-attention that computes these recurrences is installed."""
    try:
        release = importlib.metadata.version(LIBRARY)
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, re.findall(r"\d+", release)[:2])) >= OLDEST


def kernel_of(device_type: str, dtype: torch.dtype) -> str:
    """The kernel on such a device in this dtype, as records name it: `fla` or `torch`."""
    return "fla" if device_type == "cuda" and dtype in DTYPES and library_installed() else "torch"


def delta_rule_for(tensor: Tensor) -> DeltaRule:
    """The gated delta rule for tensors like this one."""
    return _fla_delta_rule if kernel_of(tensor.device.type, tensor.dtype) == "fla" else chunked_delta_rule


def state_space_for(tensor: Tensor) -> StateSpace:
    """Mamba-2's recurrence for tensors like this one."""
    return _fla_state_space if kernel_of(tensor.device.type, tensor.dtype) == "fla" else chunked_state_space


def recurrence_of(shard: LinearShard) -> Recurrence:
    """The recurrence of a shard: the gated delta rule where it is given beta, else that of Mamba-2."""

    def out(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None) -> Tensor:
        if beta is None:
            return state_space(q, k, v, decay, shard.runs, shard.scan, state_space_for(v))
        return gated_delta(q, k, v, decay, beta, shard.runs, shard.scan, delta_rule_for(v))

    return out


def _fla_delta_rule(
    q_BLHN: Tensor,
    k_BLHN: Tensor,
    v_BLVP: Tensor,
    decay_BLV: Tensor,
    beta_BLV: Tensor,
    runs: Runs,
    initial_BVNP: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    named: dict[str, object] = {"use_qk_l2norm_in_kernel": True, "state_v_first": True}  # as in the library's layers
    call = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    initial_BVPN = None if initial_BVNP is None else initial_BVNP.mT
    tensors = {"q": q_BLHN, "k": k_BLHN, "v": v_BLVP, "g": decay_BLV, "beta": beta_BLV}
    out_BLVP, state_BVPN = _called(call, named, runs, initial_BVPN, **tensors)
    return out_BLVP, state_BVPN.mT


def _fla_state_space(
    q_BLHN: Tensor, k_BLHN: Tensor, v_BLVP: Tensor, decay_BLV: Tensor, runs: Runs
) -> tuple[Tensor, Tensor]:
    call = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
    q, k = (heads_of(x_BLHN, v_BLVP.shape[2]) for x_BLHN in (q_BLHN, k_BLHN))
    return _called(call, {"scale": 1.0}, runs, None, q=q, k=k, v=v_BLVP, g=decay_BLV)


@lru_cache(maxsize=COPIES)
def bounds_on(runs: Runs, rows: int, device: torch.device) -> Tensor:
    """Where the runs of all rows, one row after the other, start, and where the last one ends."""
    starts = torch.tensor(runs.starts) + torch.arange(rows)[:, None] * runs.tokens
    return torch.cat([starts.flatten(), torch.tensor([rows * runs.tokens])]).to(device)


def _called(
    call: Any, named: dict[str, object], runs: Runs, initial: Tensor | None, **tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """Out, and the state after the last run. Several runs are packed sequences, which the library takes in one row."""
    named = named | {"output_final_state": True}
    if len(runs.starts) == 1:
        out, state = call(**tensors, initial_state=initial, **named)
        return out, state
    rows = tensors["v"].shape[0]
    if initial is not None:
        others = initial.new_zeros(rows, len(runs.starts) - 1, *initial.shape[1:])
        initial = torch.cat([initial[:, None], others], 1).flatten(0, 1)
    packed = {name: tensor.flatten(0, 1).unsqueeze(0) for name, tensor in tensors.items()}
    bounds = bounds_on(runs, rows, tensors["v"].device)
    out, states = call(**packed, initial_state=initial, cu_seqlens=bounds, **named)
    return out.squeeze(0).unflatten(0, (rows, -1)), states.unflatten(0, (rows, -1))[:, -1]
