"""Progress inside a step that takes long: the layer that the device has reached, forward or backward.

On a GPU the host runs ahead of the device: what it has launched says nothing of what is done. So each mark is an event
in the stream, and a thread asks now and then, without waiting, which one the device has passed. No work of a step waits
for a mark. Steps that take less than REPORT_SECONDS have no marks and no thread: all but the first of each length.

A step that is replayed as CUDA graphs runs no code of ours, and reports nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.models.decoder import AttendCall, Block, LayerFn, Rotary

REPORT_SECONDS = 10.0  # between two lines; the first comes so long after the step began

OnProgress = Callable[[dict[str, Any]], None]


class InsideStep:
    """The marks of one task's steps on this rank, and the thread that reports them."""

    def __init__(self, device: torch.device, rank: int) -> None:
        """Rank 0 alone reports: where others stop, so does it at what they exchange next."""
        self._on_gpu = device.type == "cuda"
        self._reports = rank == 0
        self._short: set[int] = set()  # lengths whose steps take no longer than REPORT_SECONDS
        self._marks: list[tuple[torch.cuda.Event | None, dict[str, Any]]] = []
        self._lock = threading.Lock()  # a line about a step comes before the one that ends it
        self._active = False
        self._backward = False  # whether the host has begun the backward

    @contextlib.contextmanager
    def step(self, on_progress: OnProgress, number: int, of: int, length: int) -> Iterator[None]:
        """A step on `length` tokens, the `number`-th of `of`, whose progress is reported."""
        if not self._reports or length in self._short:
            yield
            return
        self._marks, self._active, self._backward = [], True, False
        began, over = time.monotonic(), threading.Event()
        named = {"step": number, "of": of}
        threading.Thread(target=self._report, args=(on_progress, named, over), daemon=True).start()
        try:
            yield
            if time.monotonic() - began < REPORT_SECONDS:
                self._short.add(length)
        finally:
            with self._lock:
                over.set()
            self.pause()

    def pause(self) -> None:
        """No marks and no questions from here to the end of the step: while CUDA captures work, it refuses both."""
        with self._lock:
            self._active, self._marks = False, []

    def mark(self, phase: str, **place: int) -> None:
        """From here on the device is in this phase of the step."""
        if not self._active:
            return
        event = None
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
        self._marks.append((event, {"phase": phase, **place}))

    def forward_begins(self) -> None:
        """The host begins a forward: a layer that it runs now is not run again."""
        self._backward = False
        self.mark("forward")

    def watch(self, blocks: Sequence[Block]) -> None:
        """Mark where each layer begins: its forward, its backward, and within that its recomputation."""
        for number, block in enumerate(blocks, start=1):
            block.layer = self._marked(block.layer, {"layer": number, "layers": len(blocks)})  # type: ignore[assignment, method-assign]

    def _marked(self, layer: LayerFn, place: dict[str, int]) -> LayerFn:
        def backward_begins(_: Tensor) -> None:
            self._backward = True
            self.mark("backward", **place)

        def run(x_BLE: Tensor, rotary: Rotary, attend: AttendCall) -> Tensor:
            if not self._active:
                return layer(x_BLE, rotary, attend)
            if self._backward:
                self.mark("recompute", **place)
                try:
                    return layer(x_BLE, rotary, attend)
                finally:  # torch ends a recomputation by an exception as soon as it has what it needs
                    self.mark("backward", **place)
            self.mark("forward", **place)
            out_BLE = layer(x_BLE, rotary, attend)
            if out_BLE.requires_grad:
                out_BLE.register_hook(backward_begins)
            return out_BLE

        return run

    def _report(self, on_progress: OnProgress, named: dict[str, Any], over: threading.Event) -> None:
        told: dict[str, Any] | None = None
        while not over.wait(REPORT_SECONDS):
            with self._lock:
                reached = None if over.is_set() else self._reached()
                if reached is not None and reached is not told:
                    on_progress({**named, **reached})
                    told = reached

    def _reached(self) -> dict[str, Any] | None:
        """The place of the last mark that the device has passed; marks before it are forgotten."""
        passed = 0
        for event, _ in self._marks:
            if event is not None and not event.query():
                break
            passed += 1
        if passed:
            del self._marks[: passed - 1]
        return self._marks[0][1] if passed else None
