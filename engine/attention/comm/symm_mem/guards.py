"""What keeps a receive slot from being read before it is written, and from being written before it was read.

Cells of 32 bits at the start of every rank's buffer, written and awaited by streams. Two kinds: counters, for messages
that the host numbers on and on, and flags, for messages that a CUDA graph repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from engine.cuda.driver import Counters, Flags

CELL_BYTES = 4

Cells = TypeVar("Cells", Counters, Flags)


class Guards(Protocol):
    """The guards of one rank's view of a buffer. `number` is a message's; None for a rank stands for all ranks."""

    def await_slot(self, stream: int, number: int, to: int | None) -> None:
        """Make `stream` wait until the slot of message `number` at rank `to` may be written."""
        ...

    def note_arrival(self, stream: int, number: int, to: int | None) -> None:
        """This rank's part of the message is at rank `to`."""
        ...

    def await_arrival(self, stream: int, number: int, source: int | None) -> None:
        """Make `stream` wait for the part of the message that `source` sends."""
        ...

    def note_release(self, stream: int, number: int, source: int | None) -> None:
        """The slot of the message may be written again; `source` has sent what was in it."""
        ...


class CounterGuards:
    """How many messages have arrived from each rank, and how many each rank has released.

    Counts never go back: the parts of a message may be left out, and any rank may write the next one in a slot.
    """

    def __init__(self, bases: Sequence[int], rank: int, slots: int) -> None:
        """`bases`: where every rank's buffer starts."""
        self._slots, ranks, size = slots, range(len(bases)), len(bases)

        def arrived(at: int, source: int) -> int:
            return bases[at] + CELL_BYTES * source

        def released(at: int, by: int) -> int:
            return bases[at] + CELL_BYTES * (size + by)

        self._arrivals = _each_and_all(Counters, (arrived(rank, source) for source in ranks))
        self._arrived_at = _each_and_all(Counters, (arrived(at, rank) for at in ranks))
        self._releases = _each_and_all(Counters, (released(rank, by) for by in ranks))
        self._released_at_all = Counters([released(at, rank) for at in ranks])

    @staticmethod
    def first_values(size: int, slots: int) -> list[int]:
        """What the cells hold before the first message."""
        return [0] * (2 * size)

    def await_slot(self, stream: int, number: int, to: int | None) -> None:
        if number >= self._slots:
            self._releases[to].wait(stream, number - self._slots + 1)

    def note_arrival(self, stream: int, number: int, to: int | None) -> None:
        self._arrived_at[to].set(stream, number + 1)

    def await_arrival(self, stream: int, number: int, source: int | None) -> None:
        self._arrivals[source].wait(stream, number + 1)

    def note_release(self, stream: int, number: int, source: int | None) -> None:
        self._released_at_all.set(stream, number + 1)


class FlagGuards:
    """Two flags for each slot and pair of ranks: the slot is free for the sender; the sender's part has arrived.

    Who waits for a flag clears it, and sets the other one afterwards, so the driver's calls are the same for every
    message in a slot and a graph can repeat them. Each part that is sent is awaited and released once, and a slot is
    freed for the rank that wrote it: a slot has the same senders in every pass that uses it.
    """

    def __init__(self, bases: Sequence[int], rank: int, slots: int) -> None:
        """`bases`: where every rank's buffer starts."""
        self._slots, size, ranks = slots, len(bases), range(len(bases))

        def arrived(slot: int, at: int, source: int) -> int:
            return bases[at] + CELL_BYTES * (2 * slot * size + source)

        def free(slot: int, to: int, at: int) -> int:
            return bases[at] + CELL_BYTES * ((2 * slot + 1) * size + to)

        def of_slots(cell: Callable[[int, int], int]) -> list[dict[int | None, Flags]]:
            return [_each_and_all(Flags, (cell(slot, other) for other in ranks)) for slot in range(slots)]

        self._arrivals = of_slots(lambda slot, source: arrived(slot, rank, source))
        self._arrived_at = of_slots(lambda slot, at: arrived(slot, at, rank))
        self._free = of_slots(lambda slot, to: free(slot, to, rank))
        self._freed_at = of_slots(lambda slot, at: free(slot, rank, at))

    @staticmethod
    def first_values(size: int, slots: int) -> list[int]:
        """Nothing has arrived, and every slot is free for everyone."""
        return ([0] * size + [1] * size) * slots

    def await_slot(self, stream: int, number: int, to: int | None) -> None:
        self._free[number % self._slots][to].take(stream)

    def note_arrival(self, stream: int, number: int, to: int | None) -> None:
        self._arrived_at[number % self._slots][to].give(stream)

    def await_arrival(self, stream: int, number: int, source: int | None) -> None:
        self._arrivals[number % self._slots][source].take(stream)

    def note_release(self, stream: int, number: int, source: int | None) -> None:
        self._freed_at[number % self._slots][source].give(stream)


def _each_and_all(kind: type[Cells], addresses: Iterable[int]) -> dict[int | None, Cells]:
    """The cell of each rank by itself, and under None those of all ranks."""
    found = list(addresses)
    each: dict[int | None, Cells] = {rank: kind([address]) for rank, address in enumerate(found)}
    return each | {None: kind(found)}
