"""Attention that its first call computes and later calls recompute only where its result was not saved."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.attention.algorithms.saved import SavedOutput
from engine.memory.offload import Kept, Store
from engine.models.decoder import Attend


class AttendOnce:
    """The attention of one layer in one forward.

    It lives as long as that forward's graph, so several forwards may be open at once (gradient accumulation) and
    backward may run repeatedly.

    Args:
        attend: the method's attention.
        tail: fraction of the sequence, from its end, whose result is saved.
        store: where it is saved.
        passed: called whenever backward has passed this attention.
    """

    def __init__(self, attend: Attend, tail: float, store: Store, passed: Callable[[], None]) -> None:
        self._attend, self._tail, self._store, self._passed = attend, tail, store, passed
        self._called = False
        self._cut = 0
        self._saved: Kept | None = None
        self._ahead: SavedOutput | None = None

    def __call__(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, **sinks: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse): computed and saved by the first call, recomputed from the saved part by the others."""
        if not self._called:
            self._called = True
            if q_BLND.requires_grad:
                passed = self._passed  # the hook is held by the graph, which holds this object: no cycle
                q_BLND.register_hook(lambda dq_BLND: passed())
            out_BLND, lse_BNL = self._attend(q_BLND, k_BLKD, v_BLKD, **sinks)
            self._save(self._attend.keep(out_BLND, lse_BNL, self._tail))
            return out_BLND, lse_BNL
        saved, self._ahead = self._ahead or self._fetched(), None
        return self._attend(q_BLND, k_BLKD, v_BLKD, saved=saved, **sinks)

    def ahead(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, **sinks: Tensor) -> tuple[Tensor, Tensor]:
        """A recomputation whose whole result is held for the next call, so that two in a row compute attention once."""
        out_BLND, lse_BNL = self._attend(q_BLND, k_BLKD, v_BLKD, saved=self._fetched(), **sinks)
        self._ahead = SavedOutput(out_BLND.detach(), lse_BNL.detach())
        return out_BLND, lse_BNL

    def prefetch(self) -> None:
        """Start copying the saved result to the device."""
        if self._saved is not None and self._ahead is None:
            self._saved.prefetch()

    def _save(self, saved: SavedOutput | None) -> None:
        if saved is not None:
            self._cut, self._saved = saved.cut, self._store.put((saved.out_BLND, saved.lse_BNL))

    def _fetched(self) -> SavedOutput | None:
        if self._saved is None:
            return None
        out_BLND, lse_BNL = self._saved.fetch()
        return SavedOutput(out_BLND, lse_BNL, self._cut)
