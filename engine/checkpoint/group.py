"""Consecutive layers of which only the first one's input is kept; the others' follow from it in backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
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


class Group(ABC):
    """The layers of one group in one forward. Backward wants their inputs last layer first.

    Args:
        start_BLE: input of the group's first layer.
        store: where it is kept.
        previous: the group before, of which backward will ask next.
    """

    def __init__(self, start_BLE: Tensor, store: Store, previous: Group | None) -> None:
        self._start: Kept = store.put((start_BLE.detach(),))
        self._store, self._previous = store, previous
        self._steps: list[Step] = []

    def add(self, step: Step) -> int:
        """The next layer; returns its place in the group."""
        self._steps.append(step)
        return len(self._steps) - 1

    def input(self, place: int) -> Tensor:
        """Input x_BLE of the layer at `place`, outside any graph. Collective where parameters are sharded."""
        with torch.no_grad():
            return self._input(place)

    def passed(self, place: int) -> None:
        """Backward has been through the attention of the layer at `place`: what it asks for next may come.

        Not earlier, when a layer's backward holds most; not later, since the projections before attention still have
        to hide the copies.
        """
        if place == 0 and self._previous is not None:
            self._previous.prefetch()

    def prefetch(self) -> None:
        """Backward is about to reach this group."""
        self._start.prefetch()
        self._steps[0].attend.prefetch()

    @abstractmethod
    def _input(self, place: int) -> Tensor:
        """What `input` gives. SavedOutput attention of the layer at `place` is on its way afterwards."""

    def _inputs(self, first: int, kept: Kept, place: int, *, ahead: bool) -> Iterator[tuple[int, Tensor]]:
        """Places from `first`, whose input is `kept`, to `place`, each with its input: the layers between are run.
        `ahead` holds attention's results for the layers' own recomputations."""
        [x_BLE] = kept.fetch()
        yield first, x_BLE
        for index in range(first, place):
            step, following, last = self._steps[index], self._steps[index + 1], index + 1 == place
            gather(step.block)
            if not last:
                start_gathering(following.block)
            following.attend.prefetch()
            x_BLE = step.layer(x_BLE, step.rotary, step.attend.ahead if ahead else step.attend)
            if not last:
                release(step.block)  # but for the last one's, which backward needs next
            yield index + 1, x_BLE
