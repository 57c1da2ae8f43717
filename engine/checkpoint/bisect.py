"""A group that is run again as often as it takes to hold few of its inputs at once (`engine.replays`)."""

from __future__ import annotations

from torch import Tensor

from engine.checkpoint.group import Group
from engine.offload import Kept, Store
from engine.replays import stops


class BisectingGroup(Group):
    """`checkpoint.replay: bisect`.

    A request runs layers from the nearest kept input and keeps a few on the way, in the store of the first one, each
    until no later request can want it. Attention's results are not held: every run replays them from what is saved.
    """

    def __init__(self, start_BLE: Tensor, store: Store, previous: Group | None) -> None:
        super().__init__(start_BLE, store, previous)
        self._stops: list[tuple[int, Kept]] = []  # by place, ascending; the first input is not among them

    def _input(self, place: int) -> Tensor:
        first, kept = self._nearest(place)
        self._steps[first].attend.prefetch()
        wanted = stops(first, place)
        for reached, x_BLE in self._inputs(first, kept, place, ahead=False):
            self._store.settle()  # what was put has had a layer's time to leave
            if reached in wanted:
                self._stops.append((reached, self._store.put((x_BLE,))))
        return x_BLE

    def passed(self, place: int) -> None:
        if place == 0:
            super().passed(place)
            return
        following, kept = self._nearest(place - 1)
        kept.prefetch()
        self._steps[following].attend.prefetch()

    def _nearest(self, place: int) -> tuple[int, Kept]:
        """The last place up to `place` whose input is kept. Those after it are dropped: backward has passed them."""
        while self._stops and self._stops[-1][0] > place:
            self._stops.pop()
        return self._stops[-1] if self._stops else (0, self._start)
