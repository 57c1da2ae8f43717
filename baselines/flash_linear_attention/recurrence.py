"""The public calls of flash-linear-attention as its own layers make them, but that gates are given, not their logits.

It has no call of Mamba-2's name: `simple_gla` is that recurrence, for as many query and key heads as value heads.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from engine.linear.chunks import heads_of
from engine.linear.kernels import library_call
from engine.linear.runs import Runs
from engine.linear.shard import Recurrence


def plain_call(runs: Runs) -> Recurrence:
    """Of whole sequences; documents are packed sequences, which the library takes in one row."""

    def out(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None) -> Tensor:
        call: Any
        named: dict[str, object] = {"output_final_state": False}
        tensors = {"q": q, "k": k, "v": v, "g": decay}
        if beta is None:
            call = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla
            named |= {"scale": 1.0}
            tensors |= {name: heads_of(tensors[name], v.shape[2]) for name in ("q", "k")}
        else:
            call = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
            named |= {"use_qk_l2norm_in_kernel": True, "state_v_first": True}
            tensors |= {"beta": beta}
        return library_call(call, named, runs, **tensors)[0]

    return out
