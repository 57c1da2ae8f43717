"""A group that is run again once in backward, all of its inputs held until they are used."""

from __future__ import annotations

from torch import Tensor

from engine.checkpoint.group import Group
from engine.offload import Store


class HoldingGroup(Group):
    """`checkpoint.replay: hold`.

    The first request computes all inputs from the kept one, up to the layer asked for, and each is dropped when it is
    handed out; so is attention's result, which the layer's own recomputation replays.
    """

    def __init__(self, start_BLE: Tensor, store: Store, previous: Group | None) -> None:
        super().__init__(start_BLE, store, previous)
        self._held: dict[int, Tensor] = {}  # by place, on their way from a replay to their layer

    def _input(self, place: int) -> Tensor:
        if place not in self._held:
            self._held.update(self._inputs(0, self._start, place, ahead=True))
        self._steps[place].attend.prefetch()  # after the group's run, which has no room to spare; projections hide it
        return self._held.pop(place)
