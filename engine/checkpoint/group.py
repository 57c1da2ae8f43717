"""Consecutive layers of which only the first one's input is kept; backward computes the inputs of the others from it.

A layer then runs in the middle of another layer's backward. FSDP2 gathers a module's parameters when the module is
called and again when its backward begins. A call in between would enter the order of calls from which FSDP2 predicts
what to gather next, so the layer's mathematics run directly, between an explicit gathering and release. A module that
is not sharded needs neither.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from engine.checkpoint.attend_once import AttendOnce
from engine.checkpoint.counts import kept_places
from engine.memory.offload import Kept, Store
from engine.models.decoder import LayerFn, Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One layer of one forward, with all that running it again needs."""

    block: nn.Module  # whose parameters the layer uses
    layer: LayerFn
    rotary: Rotary
    attend: AttendOnce


class Group(ABC):
    """The layers of one group in one forward. Backward needs their inputs last layer first.

    Args:
        start_BLE: input of the group's first layer.
        store: where it is saved.
        previous: the group before, whose inputs backward needs next.
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
        """Backward has passed the attention of the layer at `place`: prefetch what it needs next.

        Not earlier, when a layer's backward holds most memory; not later, since the projections before attention hide
        the copies.
        """
        if place == 0 and self._previous is not None:
            self._previous.prefetch()

    def prefetch(self) -> None:
        """Backward is about to reach this group."""
        self._start.prefetch()
        self._steps[0].attend.prefetch()

    @abstractmethod
    def _input(self, place: int) -> Tensor:
        """The result of `input`; also prefetches the saved attention of the layer at `place`."""

    def _inputs(self, first: int, start: Kept, place: int, *, ahead: bool) -> Iterator[tuple[int, Tensor]]:
        """Places from `first`, whose input is `start`, to `place`, each with its input: the layers between are run.
        `ahead` holds attention's results for the layers' own recomputations."""
        [x_BLE] = start.fetch()
        yield first, x_BLE
        for index in range(first, place):
            step, following, last = self._steps[index], self._steps[index + 1], index + 1 == place
            gather(step.block)
            if not last:
                start_gathering(following.block)
            following.attend.prefetch()
            x_BLE = step.layer(x_BLE, step.rotary, step.attend.ahead if ahead else step.attend)
            if not last:
                release(step.block)  # the last one's stay, since backward needs them next
            yield index + 1, x_BLE


class HoldingGroup(Group):
    """`checkpoint.replay: hold`.

    The first request computes all inputs from the saved one, up to the requested layer, and each is dropped when it is
    returned; so is attention's result, which the layer's own recomputation uses.
    """

    def __init__(self, start_BLE: Tensor, store: Store, previous: Group | None) -> None:
        super().__init__(start_BLE, store, previous)
        self._held: dict[int, Tensor] = {}  # by place, from the group's run until their layer's

    def _input(self, place: int) -> Tensor:
        if place not in self._held:
            self._held.update(self._inputs(0, self._start, place, ahead=True))
        self._steps[place].attend.prefetch()  # after the group's run, which needs the memory; projections hide it
        return self._held.pop(place)


class BisectingGroup(Group):
    """`checkpoint.replay: bisect`.

    A request runs layers from the nearest saved input and saves a few more, in the store of the first one, each until
    no later request can need it. Attention's results are not held: every run recomputes them from the saved part.
    """

    def __init__(self, start_BLE: Tensor, store: Store, previous: Group | None) -> None:
        super().__init__(start_BLE, store, previous)
        self._between: list[tuple[int, Kept]] = []  # by place, ascending; the first input is not among them

    def _input(self, place: int) -> Tensor:
        first, start = self._nearest(place)
        self._steps[first].attend.prefetch()
        to_save = kept_places(first, place)
        for reached, x_BLE in self._inputs(first, start, place, ahead=False):
            self._store.settle()  # copies of earlier puts have had the time of a layer
            if reached in to_save:
                self._between.append((reached, self._store.put((x_BLE,))))
        return x_BLE

    def passed(self, place: int) -> None:
        if place == 0:
            super().passed(place)
            return
        following, start = self._nearest(place - 1)
        start.prefetch()
        self._steps[following].attend.prefetch()

    def _nearest(self, place: int) -> tuple[int, Kept]:
        """The last place up to `place` whose input is saved. Those after it are dropped: backward has passed them."""
        while self._between and self._between[-1][0] > place:
            self._between.pop()
        return self._between[-1] if self._between else (0, self._start)


def start_gathering(module: nn.Module) -> None:
    """Start gathering the parameters while other work is computed. Collective."""
    if isinstance(module, FSDPModule):
        module.unshard(async_op=True)


def gather(module: nn.Module) -> None:
    """Make the parameters whole for later work. Collective, unless they are whole or being gathered."""
    if isinstance(module, FSDPModule):
        module.unshard()


def release(module: nn.Module) -> None:
    """Keep only this rank's shard."""
    if isinstance(module, FSDPModule):
        module.reshard()
