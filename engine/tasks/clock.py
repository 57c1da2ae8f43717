"""Times one step on this rank: forward and whole, by CUDA events on a GPU, by the wall clock elsewhere."""

from __future__ import annotations

import time

import torch


class StepClock:
    """`start`, `mark` at the end of the forward, `stop`; then seconds of forward and of the whole step.

    A step of several forwards marks the start of each further one as well, and gets the sum of their times.

    No rank waits for another here: the slowest rank is found afterwards. `start` waits for CUDA work that was queued
    before it, so that it is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        self._marks, self._events = [], []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.mark()

    def mark(self) -> None:
        """Note this moment, without waiting for the device."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def stop(self) -> tuple[float, float]:
        """(forward_seconds, step_seconds): of all forwards, and from `start` to now with the device idle."""
        self.mark()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            first, *later = self._events
            elapsed = [first.elapsed_time(event) / 1000 for event in later]  # milliseconds
        else:
            elapsed = [mark - self._marks[0] for mark in self._marks[1:]]
        assert elapsed, "stop() without start()"
        moments = [0.0, *elapsed]
        forwards = zip(moments[::2], moments[1::2], strict=False)  # the time after the last forward has no pair
        return sum(end - start for start, end in forwards), elapsed[-1]
