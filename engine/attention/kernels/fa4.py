"""Kernel `fa4`: FlashAttention-4 (flash-attn-4 on PyPI, CuTe DSL), for Hopper and newer. The fastest kernel here.

Its backward forms dpsum = rowsum(dO * O) - dlse. Given O = 0 and dlse = -delta, dpsum is exactly delta, so O need not
exist on the rank that runs the backward.

The head dim of V may be its own: on Hopper any two up to 256, on Blackwell any two up to 128, or 192 and 128.
Some head dims get zeros in backward (`_zeros_beside`), because the library returns wrong gradients for them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.atomic import cache_dir
from engine.attention.geometry.tiles import Band, VarlenGroup, Visible
from engine.attention.kernels import (
    BackwardInputs,
    Gradients,
    Kernel,
    KernelProblem,
    WholeInputs,
    gpu_unsupported_reason,
    half_precision_unsupported_reason,
)
from engine.attention.kernels.sequences import Packed

_KEPT, _FOLDER = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"


def keep_compiled(environment: MutableMapping[str, str]) -> None:
    """Let the library keep what it compiles on disk; otherwise it compiles in each process, about 10 s of a trial.

    In a folder of the user's own (`cache_dir`): what it holds is run, and the library's own choice lies where every
    user of the host may write. Nothing is set where `environment` says otherwise, or where there is no such folder.
    The library reads both variables when it is imported; it tells its versions and sources in what it keeps apart.
    """
    if _KEPT in environment or _FOLDER in environment:
        return
    try:
        folder = cache_dir() / "flash_attention_4"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owned = folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK)
    except (OSError, RuntimeError):  # a home that cannot be written, or none
        return
    if owned:
        environment.update({_KEPT: "1", _FOLDER: str(folder)})


@lru_cache(maxsize=1)
def library() -> ModuleType:
    """The module of its public functions, and of those for one tile."""
    keep_compiled(os.environ)
    from flash_attn.cute import interface

    return interface


def _installed() -> bool:
    """FlashAttention-2 has the same module name; version 4 is its submodule `cute`."""
    package = importlib.util.find_spec("flash_attn")
    places = package.submodule_search_locations if package else None
    return any(Path(place, "cute").is_dir() for place in places or ())


# Most bytes of the fp32 sum of dQ that the kernel allocates in backward, for all heads it is given: twice those of Q.
# Longer tiles go through in groups of heads, which are many rows each.
WORKSPACE_BYTES = 1 << 31


_BLOCK_ROWS = 128  # of the sum of dQ, to which the rows of each sequence are rounded up


def kv_heads_at_once(q_BLND: Tensor, kv_heads: int, sequences: int = 0) -> int:
    """KV heads, with the query heads that read them, of one backward call: as many in each as keep to
    `WORKSPACE_BYTES`. `sequences`: how many the call has, where it takes cumulative lengths."""
    per_head = 4 * q_BLND.numel() // kv_heads
    if sequences:
        per_head += 4 * sequences * _BLOCK_ROWS * q_BLND.shape[2] * q_BLND.shape[3] // kv_heads
    most = max(1, min(kv_heads, WORKSPACE_BYTES // max(1, per_head)))
    calls = -(-kv_heads // most)
    return -(-kv_heads // calls)  # a last call of few heads would leave most of the GPU idle


def _zeros_beside(dim: int) -> int:
    """Columns of zeros that a head dim gets in backward: up to 32 or a multiple, where that is 16 or more.

    Version 4.0.0b36 sums dQ (with grouped heads dK and dV, too) on Hopper in tiles of D rounded up to 16, and reads
    them rounded up to 32, so rows get the sums of others. Zeros change nothing: scores are sums over D, and their
    columns are cut from the gradients.
    """
    short = -dim % 32
    return short if short >= 16 else 0


# One row of zeros, expanded, is an output of any number of rows.
_zeros: dict[tuple[torch.device, torch.dtype, int], Tensor] = {}


def _zero_output(like_BLND: Tensor) -> Tensor:
    key = (like_BLND.device, like_BLND.dtype, like_BLND.shape[-1])
    if key not in _zeros:
        _zeros[key] = torch.zeros(like_BLND.shape[-1], device=like_BLND.device, dtype=like_BLND.dtype)
        if like_BLND.is_cuda:  # other streams will read it as well
            torch.cuda.current_stream().synchronize()
    return _zeros[key].expand(like_BLND.shape)


def _window(band: Band, rows: int, columns: int) -> dict[str, Any]:
    """The band in the kernel's terms, which aligns query and key *ends*: row i is at column i + columns - rows."""
    if band.kind == "full":
        return {}
    shift = columns - rows
    right = None if band.hi is None else band.hi - shift
    left = None if band.lo is None else shift - band.lo
    if left is None and right == 0:
        return {"causal": True}
    # "Unlimited on one side" is a side longer than the tile.
    return {
        "window_size_left": rows + columns if left is None else left,
        "window_size_right": rows + columns if right is None else right,
    }


def _arguments(visible: Visible, rows: int, columns: int, packed: Packed | None) -> dict[str, Any]:
    """What a call shows, in the kernel's terms; `packed` has the lengths of several sequences."""
    if packed is None:
        assert isinstance(visible, Band)
        return _window(visible, rows, columns)
    assert isinstance(visible, VarlenGroup)
    lengths = {
        "cu_seqlens_q": packed.queries.bounds,
        "cu_seqlens_k": packed.keys.bounds,
        "max_seqlen_q": packed.queries.longest,
        "max_seqlen_k": packed.keys.longest,
    }
    return lengths | _window(visible.band, rows, rows + visible.longer)


@dataclass(frozen=True)
class FlashAttention4Kernel(Kernel):
    """flash_attn.cute, forward and backward on one tile."""

    name = "fa4"
    takes_sequences = True
    writes_input_dtype = True
    takes_output = True

    def unsupported_reason(self) -> str | None:
        unsupported_reason = gpu_unsupported_reason(self.name, (9, 0))
        if unsupported_reason is None and not _installed():
            return "kernel fa4 needs FlashAttention-4, which is not installed; pip install 'burst-harness[gpu]'"
        return unsupported_reason

    def refuse(self, problem: KernelProblem) -> str | None:
        if problem.softcap is not None and problem.device.type == "cuda":
            major, _ = torch.cuda.get_device_capability(problem.device)
            if major == 12 or (major > 9 and problem.head_dim == 256):
                return (
                    f"kernel fa4 has no soft-capped backward for head_dim {problem.head_dim} on compute capability "
                    f"{major}; choose flex, reference or auto"
                )
        reason = half_precision_unsupported_reason(self.name, problem)
        return reason or self._unequal_unsupported_reason(problem)

    def _unequal_unsupported_reason(self, problem: KernelProblem) -> str | None:
        """Why the library has no kernel for these two head dims, or None."""
        dims = problem.head_dim, problem.value_dim
        if dims[0] == dims[1] or max(dims) <= 128 or dims == (192, 128):
            return None
        major, _ = torch.cuda.get_device_capability(problem.device)
        if major == 9:
            return None
        return (
            f"kernel fa4 on compute capability {major} takes two head dims up to 128, or 192 and 128, found {dims[0]} "
            f"and {dims[1]}; choose kernel auto or reference"
        )

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, visible: Visible, scale: float
    ) -> tuple[Tensor, Tensor]:
        packed = Packed.of(visible, q_BLND, k_BMKD) if isinstance(visible, VarlenGroup) else None
        q, k, v = (q_BLND, k_BMKD, v_BMKD) if packed is None else packed.side_by_side(q_BLND, k_BMKD, v_BMKD)
        out, lse, *_ = library()._flash_attn_fwd(
            q,
            k,
            v,
            softmax_scale=scale,
            return_lse=True,
            softcap=self.softcap,
            **_arguments(visible, q_BLND.shape[1], k_BMKD.shape[1], packed),
        )
        if packed is None:
            return out, lse
        batch = q_BLND.shape[0]
        return packed.queries.restored(out, batch), packed.queries.restored_rows(lse, batch)

    def backward(self, given: BackwardInputs, visible: Visible, scale: float, deterministic: bool) -> Gradients:
        q_BLND, dout_BLND, lse_BNL, delta_BNL, k_BMKD, v_BMKD = given
        whole = WholeInputs(q_BLND, _zero_output(dout_BLND), dout_BLND, lse_BNL, k_BMKD, v_BMKD)
        return self._any_lengths(whole, -delta_BNL, visible, scale, deterministic)

    def backward_of_whole(self, given: WholeInputs, visible: Visible, scale: float, deterministic: bool) -> Gradients:
        return self._any_lengths(given, None, visible, scale, deterministic)

    def _any_lengths(
        self, given: WholeInputs, dlse_BNL: Tensor | None, visible: Visible, scale: float, deterministic: bool
    ) -> Gradients:
        """One rectangle as it is; several sequences as one batch with cumulative lengths."""
        dims = given.q_BLND.shape[-1], given.k_BLKD.shape[-1], given.v_BLKD.shape[-1]
        if any(map(_zeros_beside, dims)):
            wide = [
                each if each is given.lse_BNL else F.pad(each, (0, _zeros_beside(each.shape[-1]))) for each in given
            ]
            found = self._any_lengths(WholeInputs(*wide), dlse_BNL, visible, scale, deterministic)
            dq_BLND, dk_BMKD, dv_BMKD = (each[..., :dim] for each, dim in zip(found, dims, strict=True))
            return dq_BLND, dk_BMKD, dv_BMKD
        q_BLND, out_BLND, dout_BLND, lse_BNL, k_BMKD, v_BMKD = given
        packed = Packed.of(visible, q_BLND, k_BMKD) if isinstance(visible, VarlenGroup) else None
        named = _arguments(visible, q_BLND.shape[1], k_BMKD.shape[1], packed)
        named |= {"softmax_scale": scale, "deterministic": deterministic}
        if self.softcap is not None:
            named["softcap"] = self.softcap
        if packed is None or packed.as_they_are:
            return self._all_heads(given, dlse_BNL, named)
        queries, keys, batch = packed.queries, packed.keys, q_BLND.shape[0]
        q, out, dout = (queries.packed(each)[None] for each in (q_BLND, out_BLND, dout_BLND))
        lse, dlse = (None if each is None else queries.packed_rows(each)[None] for each in (lse_BNL, dlse_BNL))
        assert lse is not None
        one_batch = WholeInputs(q, out, dout, lse, keys.packed(k_BMKD)[None], keys.packed(v_BMKD)[None])
        dq, dk, dv = (each[0] for each in self._all_heads(one_batch, dlse, named))
        return queries.restored(dq, batch), keys.restored(dk, batch), keys.restored(dv, batch)

    def _all_heads(self, given: WholeInputs, dlse_BNL: Tensor | None, named: dict[str, Any]) -> Gradients:
        """All heads at once, or in groups of them, a call of the kernel each. `named`: arguments of the call."""
        q_BLND, k_BMKD = given.q_BLND, given.k_BLKD
        kv_heads = k_BMKD.shape[2]
        sequences = len(named["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in named else 0
        at_once, group = kv_heads_at_once(q_BLND, kv_heads, sequences), q_BLND.shape[2] // kv_heads
        if at_once == kv_heads:
            return _one_call(given, dlse_BNL, named)
        dq_BLND, dk_BMKD, dv_BMKD = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q_BLND, k_BMKD, given.v_BLKD)
        )
        for first in range(0, kv_heads, at_once):
            keys = slice(first, min(first + at_once, kv_heads))
            queries = slice(keys.start * group, keys.stop * group)
            part_dlse_BNL = None if dlse_BNL is None else dlse_BNL[:, queries]
            into = (dq_BLND[:, :, queries], dk_BMKD[:, :, keys], dv_BMKD[:, :, keys])
            _one_call(given.heads(queries, keys), part_dlse_BNL, named, into)
        return dq_BLND, dk_BMKD, dv_BMKD


def _one_call(
    given: WholeInputs, dlse_BNL: Tensor | None, named: dict[str, Any], into: Gradients | None = None
) -> Gradients:
    """One call of the kernel's backward, which writes `into` these tensors where they are given."""
    tensors: list[Tensor] = [*given[:3], given.lse_BNL.contiguous(), *given[4:]]
    optional = dict(zip(("dq", "dk", "dv"), into, strict=True)) if into else {}
    if dlse_BNL is not None:
        optional["dlse"] = dlse_BNL
    with_lengths = "cu_seqlens_q" in named
    if with_lengths:  # a batch of one, whose dimension the kernel does not take
        tensors = [each.squeeze(0) for each in tensors]
        optional = {name: each.squeeze(0) for name, each in optional.items()}
    q, out, dout, lse, k, v = tensors
    found: Gradients = library()._flash_attn_bwd(q, k, v, out, dout, lse, **optional, **named)
    if not with_lengths:
        return found
    dq, dk, dv = found
    return dq.unsqueeze(0), dk.unsqueeze(0), dv.unsqueeze(0)


KERNEL = FlashAttention4Kernel()
