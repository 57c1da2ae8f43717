"""A bounded cache of plans: a context keeps what it has resolved for shapes, dtype, device, mask and choices.

A plan holds no tensors and nothing of a stream, so calls under `no_grad`, on several streams and from several threads
share it. What is collective about planning (communicators, a measured link) is kept by the context itself, for as long
as it lives: a plan that was dropped is made again without a message. All ranks make the same calls, so they keep and
drop the same plans.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Any

MAX_PLANS = 64  # of a context: layers share one, and masks that differ every step pass through


class PlanCache:
    """The plans used last, by everything that decided them."""

    def __init__(self, size: int = MAX_PLANS) -> None:
        self._size = size
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: Hashable) -> Any:
        """The plan of `key`, or None."""
        with self._lock:
            plan = self._plans.get(key)
            if plan is not None:
                self._plans.move_to_end(key)
            return plan

    def put(self, key: Hashable, plan: Any) -> Any:
        """Keep `plan`, and drop the one that was not used for longest. Returns the plan that is kept: another thread's
        where that came first."""
        with self._lock:
            plan = self._plans.setdefault(key, plan)
            self._plans.move_to_end(key)
            if len(self._plans) > self._size:
                self._plans.popitem(last=False)
            return plan

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            self._plans.clear()
