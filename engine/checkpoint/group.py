"""Consecutive layers of which only the first one's input is kept; the others' follow from it in backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.checkpoint.attend_once import AttendOnce
from engine.checkpoint.parameters import gather, release, start_gathering
from engine.model import LayerFn, Rotary
from engine.offload import Kept, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One layer of one forward, as it can be run again."""

    block: nn.Module  # whose parameters the layer uses
    layer: LayerFn
    rotary: Rotary
    attend: AttendOnce


class Group:
    """The layers of one group in one forward.

    Backward wants the inputs last layer first. The first request computes all of them from the kept one, up to the
    layer asked for, and each is dropped when it is handed out; so is attention's result, which the layer's own
    recomputation replays.

    Args:
        start_BLE: input of the group's first layer.
        store: where it is kept.
        previous: the group before, of which backward will ask next.
    """

    def __init__(self, start_BLE: Tensor, store: Store, previous: Group | None) -> None:
        self._start: Kept = store.put((start_BLE.detach(),))
        self._previous = previous
        self._steps: list[Step] = []
        self._inputs: dict[int, Tensor] = {}  # by place, on their way from a replay to their layer

    def add(self, step: Step) -> int:
        """The next layer; returns its place in the group."""
        self._steps.append(step)
        return len(self._steps) - 1

    def input(self, place: int) -> Tensor:
        """Input x_BLE of the layer at `place`, outside any graph. Collective where parameters are sharded."""
        self._steps[place].attend.prefetch()
        if place not in self._inputs:
            self._replay(place)
        if place == 0 and self._previous is not None:
            self._previous.prefetch()
        return self._inputs.pop(place)

    def prefetch(self) -> None:
        """Backward is about to reach this group."""
        self._start.prefetch()
        self._steps[0].attend.prefetch()

    @torch.no_grad()
    def _replay(self, place: int) -> None:
        """Inputs up to that of the layer at `place`."""
        [x_BLE] = self._start.fetch()
        self._inputs[0] = x_BLE
        for index, step in enumerate(self._steps[:place]):
            gather(step.block)
            if index + 1 < place:
                start_gathering(self._steps[index + 1].block)
            self._steps[index + 1].attend.prefetch()
            x_BLE = step.layer(x_BLE, step.rotary, step.attend.ahead)
            self._inputs[index + 1] = x_BLE
            if index + 1 < place:
                release(step.block)  # but for the last one's, which backward needs next
