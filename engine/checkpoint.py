"""What backward finds of a layer: everything, its input alone, or its input and attention's output.

Sequence-level selective checkpointing (BurstEngine, arXiv:2509.19836): a layer is computed again in backward, but
attention, whose cost grows with the square of the length, is replayed from its stored output and LSE.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.attention.stored import Stored
from engine.model import Activations, Attend, LayerFn, Rotary, keep_all
from engine.settings import Checkpoint


def activations(settings: Checkpoint) -> Activations:
    """The policy these settings ask for: one of the functions below, or `engine.model.keep_all`."""
    if settings.every == 0:
        return keep_all
    return recompute_around_attention if settings.tail == 1.0 else recompute


def recompute(layer: LayerFn, x_BLE: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
    """Keep the layer's input; backward computes the whole layer again, attention and its communication included."""
    if not torch.is_grad_enabled():  # evaluation keeps nothing anyway
        return layer(x_BLE, rotary, attend)
    # No dropout anywhere, so no random state to restore.
    return checkpoint(layer, x_BLE, rotary, attend, use_reentrant=False, preserve_rng_state=False)


def recompute_around_attention(layer: LayerFn, x_BLE: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
    """Keep the layer's input and attention's (out, lse); backward computes the rest again."""
    return recompute(layer, x_BLE, rotary, _AttendOnce(attend) if torch.is_grad_enabled() else attend)


class _AttendOnce:
    """Attention that is computed by its first call and replayed by all later ones.

    One object per call of a layer: it lives as long as that call's graph, so several forwards may be open at once
    (gradient accumulation) and backward may run repeatedly.
    """

    def __init__(self, attend: Any) -> None:
        self._attend = attend
        self._stored: Stored | None = None

    def __call__(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Any]:
        if self._stored is not None:
            return self._attend(q_BLND, k_BLKD, v_BLKD, stored=self._stored)
        out_BLND, lse = self._attend(q_BLND, k_BLKD, v_BLKD)
        self._stored = self._attend.keep(out_BLND, lse, 1.0)
        return out_BLND, lse
