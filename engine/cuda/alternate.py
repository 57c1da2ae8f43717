"""Two CUDA streams used in turn, so that one kernel's last tiles and the next kernel's first ones share the GPU.

An attention kernel ends with fewer tiles than the GPU has processors. On one stream the next kernel waits for the last
of them; on two it starts meanwhile (TransformerEngine's context parallelism does so in every forward).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from engine.cuda.streams import own_stream


class StreamPass(Protocol):
    """The streams of one forward or backward, whose caller's stream is the first of them."""

    def turn(self, index: int) -> AbstractContextManager[object]:
        """Makes the stream of step `index` the current one."""
        ...

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Memory of `tensors` is used on every stream: it is not given to others before all have passed that use."""
        ...

    def join(self) -> None:
        """The current stream waits for what the others were given so far."""
        ...

    def end(self) -> None:
        """The caller's stream, which is the current one again, waits for the others. Called once."""
        ...


class Streams(Protocol):
    """Begins a pass. Made once, used by many passes."""

    def begin(self) -> StreamPass: ...


class OneStream:
    """Everything stays on the caller's stream; what a CPU has. A `Streams`, and its own `StreamPass`."""

    def begin(self) -> StreamPass:
        return self

    def turn(self, index: int) -> AbstractContextManager[object]:
        return nullcontext()

    def share(self, tensors: Iterable[Tensor]) -> None:
        """One stream runs in order."""

    def join(self) -> None:
        """One stream runs in order."""

    def end(self) -> None:
        """One stream runs in order."""


ONE_STREAM = OneStream()


class TwoStreams:
    """The caller's stream and one of its own: even steps run on the first, odd steps on the second. A `Streams`.

    Shared tensors are recorded on both streams. The allocator finds out late that both have passed them, so a host that
    runs far ahead reserves more memory than it uses. `HoldingStreams` has no such memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = own_stream(device)

    def begin(self) -> StreamPass:
        return _TwoStreamPass(torch.cuda.current_stream(self._side.device), self._side)


class HoldingStreams:
    """As `TwoStreams`, but shared tensors live until their pass ends and the caller's stream has waited for the other.

    Memory that a pass took on the side stream is next taken in a later pass, which begins with a wait for the stream of
    the pass before: so none is recorded. For passes whose shared tensors are few. One for all passes of a device.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = own_stream(device)
        self._last: torch.cuda.Stream | None = None  # that a pass began on

    def begin(self) -> StreamPass:
        main = torch.cuda.current_stream(self._side.device)
        if self._last is not None and self._last != main:
            self._side.wait_stream(self._last)
        self._last = main
        return _HoldingPass(main, self._side)


class _TwoStreamPass:
    def __init__(self, main: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
        self._streams = (main, side)
        side.wait_stream(main)  # the inputs are formed there

    def turn(self, index: int) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._streams[index % 2])

    def share(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            for stream in self._streams:
                tensor.record_stream(stream)

    def join(self) -> None:
        current = torch.cuda.current_stream(self._streams[0].device)
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)

    def end(self) -> None:
        main, side = self._streams
        main.wait_stream(side)


class _HoldingPass(_TwoStreamPass):
    def __init__(self, main: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
        super().__init__(main, side)
        self._held: list[Tensor] = []

    def share(self, tensors: Iterable[Tensor]) -> None:
        self._held.extend(tensors)

    def end(self) -> None:
        super().end()
        self._held.clear()


def streams_of(count: int, device: torch.device) -> Streams:
    """One stream, or two of a GPU; other devices have one."""
    return TwoStreams(device) if count == 2 and device.type == "cuda" else ONE_STREAM


@lru_cache
def holding_streams_of(device: torch.device) -> Streams:
    """Two streams of a GPU that hold what they share, the same for every caller; other devices have one stream."""
    return HoldingStreams(device) if device.type == "cuda" else ONE_STREAM
