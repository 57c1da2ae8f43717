"""Two CUDA streams used in turn, so that one kernel's last tiles and the next kernel's first ones share the GPU.

An attention kernel ends with fewer tiles than the GPU has processors. On one stream the next kernel waits for the last
of them; on two it starts meanwhile (TransformerEngine's context parallelism does so in every forward).

torch's allocator reuses memory on the stream that it was allocated on. Memory that both streams use is kept for some
steps, until each stream has waited for the other's uses: marking it with `record_stream` would keep it until the device
has passed them, and the host is layers ahead of the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import torch
from torch import Tensor

from engine.cuda.streams import own_stream


class StreamPass:
    """The streams of one forward or backward, here the caller's alone, which runs everything in order.

    A context: at its end, also after an exception, every stream has waited for all others, so what the pass used can be
    freed.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing to wait for."""

    def turn(self, index: int) -> AbstractContextManager[object]:
        """Makes the stream of step `index` the current one. Steps are numbered from 0, without a gap."""
        return nullcontext()

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Memory of `tensors` is used on every stream, for the last time in the current step, or by a transfer that the
        next step waits for. The caller may drop them at once."""

    def join(self) -> None:
        """The current stream waits for what the others were given so far."""

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Memory of `tensors` is the result, which the caller's stream uses from now on."""


class OneStream(StreamPass):
    """Begins passes on the caller's stream alone, as on a CPU; a pass has no state, so it is its own."""

    def begin(self) -> StreamPass:
        return self


ONE_STREAM = OneStream()

_BEHIND = 3  # steps: the other stream's last step but one; the last one is still to run beside this one


class TwoStreams:
    """Begins passes on the caller's stream and one of its own: even steps run on the first, odd steps on the second."""

    def __init__(self, device: torch.device) -> None:
        self._side = own_stream(device)

    def begin(self) -> StreamPass:
        return _TwoStreamPass(torch.cuda.current_stream(self._side.device), self._side)


class _TwoStreamPass(StreamPass):
    """Step n begins once the other stream has ended step n - 3. That delays nothing: step n - 1, beside which step n is
    to run, comes after step n - 3 on the same stream.

    When step n begins, its own stream is behind steps n - 2, n - 3 and all before. The other stream was behind step
    n - 4 when step n - 1 began. So memory that was last used in step n - 4, on either stream, is free for both; and so
    is memory that a transfer read which step n - 3 has waited for.
    """

    def __init__(self, main: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
        self._streams = (main, side)
        self._step = 0
        self._ends: deque[torch.cuda.Event] = deque(maxlen=_BEHIND)  # of the steps before
        self._shared: deque[tuple[int, tuple[Tensor, ...]]] = deque()  # by the step that shared them
        side.wait_stream(main)  # the inputs are formed there

    def __exit__(self, *error: object) -> None:
        main, side = self._streams
        main.wait_stream(side)
        side.wait_stream(main)  # memory of the side stream was read there
        self._shared.clear()

    @contextmanager
    def turn(self, index: int) -> Iterator[None]:
        stream, self._step = self._streams[index % 2], index
        with torch.cuda.stream(stream):
            if len(self._ends) == _BEHIND:
                stream.wait_event(self._ends[0])
            while self._shared and self._shared[0][0] < index - _BEHIND:
                self._shared.popleft()
            yield
            self._ends.append(stream.record_event())

    def share(self, tensors: Iterable[Tensor]) -> None:
        self._shared.append((self._step, tuple(tensors)))

    def join(self) -> None:
        current = torch.cuda.current_stream(self._streams[0].device)
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)

    def give(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            tensor.record_stream(self._streams[0])  # no effect on memory of that stream


Streams = OneStream | TwoStreams  # made once, used by many passes


def streams_of(count: int, device: torch.device) -> Streams:
    """One stream, or two of a GPU; other devices have one."""
    return TwoStreams(device) if count == 2 and device.type == "cuda" else ONE_STREAM
