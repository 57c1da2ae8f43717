"""Attention that is computed by its first call and replayed by later ones, as far as its result was kept."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.attention.algorithms.saved import SavedOutput
from engine.memory.offload import Kept, Store
from engine.model import Attend


class AttendOnce:
    """The attention of one layer in one forward.

    It lives as long as that forward's graph, so several forwards may be open at once (gradient accumulation) and
    backward may run repeatedly.

    Args:
        attend: the method's attention.
        tail: fraction of the sequence, from its end, whose result is kept.
        store: where it is kept.
        passed: called whenever backward has been through it.
    """

    def __init__(self, attend: Attend, tail: float, store: Store, passed: Callable[[], None]) -> None:
        self._attend, self._tail, self._store, self._passed = attend, tail, store, passed
        self._called = False
        self._cut = 0
        self._kept: Kept | None = None
        self._ahead: SavedOutput | None = None

    def __call__(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse): computed and kept by the first call, replayed by the others."""
        if not self._called:
            self._called = True
            if q_BLND.requires_grad:
                passed = self._passed  # the hook lives in the graph, which holds this object: no cycle
                q_BLND.register_hook(lambda dq_BLND: passed())
            out_BLND, lse_BNL = self._attend(q_BLND, k_BLKD, v_BLKD)
            self._keep(self._attend.keep(out_BLND, lse_BNL, self._tail))
            return out_BLND, lse_BNL
        saved, self._ahead = self._ahead or self._fetched(), None
        return self._attend(q_BLND, k_BLKD, v_BLKD, saved=saved)

    def ahead(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor) -> tuple[Tensor, Tensor]:
        """A replay whose whole result is held for the next call, so that two in a row compute attention once."""
        out_BLND, lse_BNL = self._attend(q_BLND, k_BLKD, v_BLKD, saved=self._fetched())
        self._ahead = SavedOutput(out_BLND.detach(), lse_BNL.detach())
        return out_BLND, lse_BNL

    def prefetch(self) -> None:
        """A replay is near."""
        if self._kept is not None and self._ahead is None:
            self._kept.prefetch()

    def _keep(self, saved: SavedOutput | None) -> None:
        if saved is not None:
            self._cut, self._kept = saved.cut, self._store.put((saved.out_BLND, saved.lse_BNL))

    def _fetched(self) -> SavedOutput | None:
        if self._kept is None:
            return None
        out_BLND, lse_BNL = self._kept.fetch()
        return SavedOutput(out_BLND, lse_BNL, self._cut)
