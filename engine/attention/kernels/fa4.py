"""Kernel `fa4`: FlashAttention-4 (flash-attn-4 on PyPI, CuTe DSL), for Hopper and newer. The fastest kernel here.

Its backward forms dpsum = rowsum(dO * O) - dlse. Given O = 0 and dlse = -delta, dpsum is exactly delta, so O need not
exist on the rank that runs the backward.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.atomic import cache_dir
from engine.attention.geometry.tiles import Band
from engine.attention.kernels import (
    BackwardInputs,
    Gradients,
    Kernel,
    KernelProblem,
    WholeInputs,
    gpu_unsupported_reason,
    half_precision_unsupported_reason,
)

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
def _interface() -> Any:
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


def kv_heads_at_once(q_BLND: Tensor, kv_heads: int) -> int:
    """KV heads, with the query heads that read them, of one backward call: the most that keep to `WORKSPACE_BYTES`."""
    per_head = max(1, 4 * q_BLND.numel() // kv_heads)
    return max(1, min(kv_heads, WORKSPACE_BYTES // per_head))


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


@dataclass(frozen=True)
class FlashAttention4Kernel(Kernel):
    """flash_attn.cute, forward and backward on one tile."""

    name = "fa4"
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
        return half_precision_unsupported_reason(self.name, problem, max_head_dim=256)

    def forward(
        self, q_BLND: Tensor, k_BMKD: Tensor, v_BMKD: Tensor, band: Band, scale: float
    ) -> tuple[Tensor, Tensor]:
        out_BLND, lse_BNL, *_ = _interface()._flash_attn_fwd(
            q_BLND,
            k_BMKD,
            v_BMKD,
            softmax_scale=scale,
            return_lse=True,
            softcap=self.softcap,
            **_window(band, q_BLND.shape[1], k_BMKD.shape[1]),
        )
        return out_BLND, lse_BNL

    def backward(self, given: BackwardInputs, band: Band, scale: float, deterministic: bool) -> Gradients:
        q_BLND, dout_BLND, lse_BNL, delta_BNL, k_BMKD, v_BMKD = given
        whole = WholeInputs(q_BLND, _zero_output(q_BLND), dout_BLND, lse_BNL, k_BMKD, v_BMKD)
        return self._all_heads(whole, -delta_BNL, band, scale, deterministic)

    def backward_of_whole(self, given: WholeInputs, band: Band, scale: float, deterministic: bool) -> Gradients:
        return self._all_heads(given, None, band, scale, deterministic)

    def _all_heads(
        self, given: WholeInputs, dlse_BNL: Tensor | None, band: Band, scale: float, deterministic: bool
    ) -> Gradients:
        """All heads at once, or in groups of them, a call of the kernel each."""
        q_BLND, k_BMKD = given.q_BLND, given.k_BLKD
        kv_heads = k_BMKD.shape[2]
        at_once, group = kv_heads_at_once(q_BLND, kv_heads), q_BLND.shape[2] // kv_heads
        if at_once == kv_heads:
            return self._one_call(given, dlse_BNL, band, scale, deterministic)
        dq_BLND, dk_BMKD, dv_BMKD = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q_BLND, k_BMKD, given.v_BLKD)
        )
        for first in range(0, kv_heads, at_once):
            keys = slice(first, min(first + at_once, kv_heads))
            queries = slice(keys.start * group, keys.stop * group)
            part_dlse_BNL = None if dlse_BNL is None else dlse_BNL[:, queries]
            dq_BLND[:, :, queries], dk_BMKD[:, :, keys], dv_BMKD[:, :, keys] = self._one_call(
                given.heads(queries, keys), part_dlse_BNL, band, scale, deterministic
            )
        return dq_BLND, dk_BMKD, dv_BMKD

    def _one_call(
        self, given: WholeInputs, dlse_BNL: Tensor | None, band: Band, scale: float, deterministic: bool
    ) -> Gradients:
        """One call of the kernel."""
        q_BLND, out_BLND, dout_BLND, lse_BNL, k_BMKD, v_BMKD = given
        named: dict[str, Any] = {} if dlse_BNL is None else {"dlse": dlse_BNL}
        if self.softcap is not None:
            named["softcap"] = self.softcap
        dq_BLND, dk_BMKD, dv_BMKD = _interface()._flash_attn_bwd(
            q_BLND,
            k_BMKD,
            v_BMKD,
            out_BLND,
            dout_BLND,
            lse_BNL.contiguous(),
            softmax_scale=scale,
            deterministic=deterministic,
            **named,
            **_window(band, q_BLND.shape[1], k_BMKD.shape[1]),
        )
        return dq_BLND, dk_BMKD, dv_BMKD


KERNEL = FlashAttention4Kernel()
