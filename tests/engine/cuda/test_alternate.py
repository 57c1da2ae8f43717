"""Memory that two streams share is kept until both have waited for each other's uses, and no longer than some steps.

The streams stand in for CUDA's. Each stream counts its own work, and the work of the other stream that it has waited
for.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from engine.cuda import alternate
from engine.cuda.alternate import TwoStreams

DEVICE = torch.device("cpu")
STEPS = 20


class Stream:
    """A stream whose work is counted. `knows[other]`: work of another stream that it has waited for."""

    def __init__(self, name: str) -> None:
        self.name, self.device = name, DEVICE
        self.knows = {"main": 0, "side": 0}

    def launch(self) -> int:
        self.knows[self.name] += 1
        return self.knows[self.name]

    def record_event(self) -> dict[str, int]:
        return dict(self.knows)

    def wait_event(self, event: dict[str, int]) -> None:
        self.knows = {name: max(known, event[name]) for name, known in self.knows.items()}

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.knows)


class Memory:
    """Notes, for each stream, its last work that used the memory."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}

    def use(self, stream: Stream) -> None:
        self.used[stream.name] = stream.launch()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Stream, Stream]]:
    main, side = Stream("main"), Stream("side")
    current = [main]

    @contextmanager
    def made_current(stream: Stream) -> Iterator[None]:
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    cuda = SimpleNamespace(stream=made_current, current_stream=lambda device: current[-1])
    monkeypatch.setattr(alternate, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(alternate, "own_stream", lambda device: side)
    main.launch()
    yield main, side
    assert current == [main]


def ring(main: Stream, side: Stream, fails_at: int | None = None) -> list[int]:
    """A forward that receives a chunk in every step, one step ahead, and sends it on in the next; how many chunks exist
    at a time. Fails where a chunk's memory is free and some stream does not know of all its uses."""
    alive: dict[int, dict[str, int]] = {}
    chunks: dict[int, weakref.ref[Memory]] = {}

    def check() -> None:
        for number in [number for number, chunk in chunks.items() if chunk() is None]:
            del chunks[number]
            for stream in (main, side):
                assert all(stream.knows[name] >= work for name, work in alive[number].items()), (number, stream.name)

    counts = []
    with TwoStreams(DEVICE).begin() as steps:
        assert side.knows["main"] == main.knows["main"]
        coming: Memory | None = None
        sent: Memory | None = None
        for index in itertools.count():
            with steps.turn(index):
                stream = main if index % 2 == 0 else side
                check()
                if sent is not None:
                    sent.use(stream)  # waits for the transfer that read it
                chunk, sent = coming, None
                if index == STEPS:
                    break
                if index == fails_at:
                    raise RuntimeError("no memory left for a tile")
                coming = Memory() if index + 1 < STEPS else None
                if coming is not None:
                    coming.use(stream)
                    chunks[index], alive[index] = weakref.ref(coming), coming.used
                if chunk is not None:
                    steps.share((chunk,))
                    chunk.use(stream)
                sent = chunk
                del chunk
                check()
                counts.append(len(chunks))
        steps.join()
        assert main.knows["side"] == side.knows["side"]
    check()
    assert not chunks
    return counts


def test_shared_memory_is_free_once_both_streams_know_of_its_uses_and_five_chunks_exist_at_most(streams) -> None:
    assert max(ring(*streams)) == 5  # the one that is being received among them


def test_after_a_failure_both_streams_know_of_everything(streams) -> None:
    main, side = streams
    with pytest.raises(RuntimeError, match="no memory left"):
        ring(main, side, fails_at=7)
    assert main.knows["side"] == side.knows["side"]
    assert side.knows["main"] == main.knows["main"]


def test_a_step_does_not_wait_for_the_step_before(streams) -> None:
    main, side = streams
    last = {}
    with TwoStreams(DEVICE).begin() as steps:
        for index in range(STEPS):
            with steps.turn(index):
                stream, other = (main, side) if index % 2 == 0 else (side, main)
                known = stream.knows[other.name]
                assert known < other.knows[other.name] or index < 1
                assert known >= last.get(index - 3, 0)
                last[index] = stream.launch()
