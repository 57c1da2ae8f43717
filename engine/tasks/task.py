"""Parts that the tasks share: attention bound to its ranks, a clock, progress, and the measurement that ends a
trial."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from engine.attention.algorithms.saved import AttentionFn, SavedOutput
from engine.attention.comm_volume import SentBytes
from engine.attention.context import ContextParallel
from engine.attention.masks import Documents, Mask, parse_mask
from engine.distributed import World
from engine.measurement import ALLOCATION_RETRIES, PROGRESS_FILE, Extra, Measurement, measured_part
from engine.memory.gpu_state import GpuReading, read_gpu
from engine.memory.resources import device_name, software, usage
from engine.method import NativeMethod
from engine.models.decoder import AttendCall, Block, LayerFn, MixCall, Rotary
from engine.ops import STEP
from engine.settings import Steps, TrialSettings

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}  # that a trial computes in

_L2_FLUSH_BYTES = 1 << 28  # several times the L2 of any current GPU
REPORT_SECONDS = 10.0  # between two lines; the first comes so long after the step began

OnProgress = Callable[[dict[str, object]], None]
Result = TypeVar("Result")
AroundStep = Callable[[], AbstractContextManager[None]]


class Refused(ValueError):
    """The trial cannot run with these settings on this machine: a result, not an error of the program."""


class Task(Protocol):
    """One trial's work on this rank. Constructing it is the set-up: a ValueError there refuses the trial."""

    def run(self, on_progress: OnProgress, around_step: AroundStep = nullcontext) -> Measurement:
        """Do the work, calling `on_progress` after every step. Collective; every rank returns the same figures.

        Each measured step takes place within a context of its own from `around_step`.
        """
        ...

    def check(self) -> Extra:
        """After `run`, entries of the measurement's `extra`: how far the task's results are from a float64 run, as
        `error`, or why that cannot be said, as `unchecked`; empty where the task forms no such run. Raises every peak.
        Collective."""
        ...

    def again(self) -> None:
        """After `run`, one step more that is not measured. Collective."""
        ...


def context_parallel(settings: TrialSettings, method: NativeMethod, world: World) -> ContextParallel:
    """The ranks of this replica, in the method's layout. Collective over them."""
    layout = method.layout(settings)
    cp = ContextParallel(group=world.cp_group, layout=layout)
    cp.segments(settings.row_tokens)  # refuses lengths that do not split
    return cp


def documents_of(settings: TrialSettings) -> Documents | None:
    """Documents that the mask of a trial has in every sequence, where linear layers start again."""
    mask = parse_mask(settings.mask)
    return mask if isinstance(mask, Documents) else None


class RefusingAttention:
    """A method's attention whose ValueErrors refuse the trial: it knows shapes and dtype only at its first call."""

    def __init__(self, attend: AttentionFn) -> None:
        self._attend = attend

    def __call__(
        self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, *, saved: SavedOutput | None = None, **sinks: Tensor
    ) -> tuple[Tensor, Tensor]:
        try:
            return self._attend(q_BLND, k_BLKD, v_BLKD, saved=saved, **sinks)
        except ValueError as error:
            raise Refused(str(error)) from error

    def keep(self, out_BLND: Tensor, lse_BNL: Tensor, tail: float) -> SavedOutput | None:
        return self._attend.keep(out_BLND, lse_BNL, tail)

    def under(self, mask: Mask, cp: ContextParallel) -> RefusingAttention:
        """The same attention under the mask of one batch, in its layout. Methods whose attention has no such way refuse
        mask `documents`."""
        under: Callable[[Mask, ContextParallel], AttentionFn] = getattr(self._attend, "under")  # noqa: B009
        return RefusingAttention(under(mask, cp))

    def resolved(self) -> dict[str, str]:
        """The value of every `auto`; empty before the first call."""
        return self._attend.resolved()

    def computed_sent(self) -> SentBytes | None:
        """Bytes this rank sends in one forward and backward, from methods that compute them beforehand; else None."""
        compute = getattr(self._attend, "computed_sent", None)
        return compute() if compute else None

    def annotate(self, figures: Measurement) -> None:
        """Let a compared system add its release and versions to what was measured."""
        if annotate := getattr(self._attend, "annotate", None):
            annotate(figures)


def progress_to(trial_dir: Path) -> OnProgress:
    """Append each step as one JSON line to the trial's progress file."""

    def append(step: dict[str, object]) -> None:
        with open(trial_dir / PROGRESS_FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps(step, allow_nan=False) + "\n")

    return append


def read_gpus(world: World) -> list[GpuReading]:
    """Every rank's GPU as it is now, in rank order; empty on CPUs. Collective. For use outside of timed steps."""
    return [gpu for gpu in world.gather(read_gpu(world.device)) if gpu is not None]


def measured(
    world: World,
    cp: ContextParallel,
    before: Sequence[GpuReading],
    after: Sequence[GpuReading],
    figures: Measurement,
    *,
    captured_bytes: int = 0,
) -> Measurement:
    """The task's figures with memory and sent bytes of each rank since the last resets. Collective.

    `before` and `after` are the GPUs before the warm-up and right after the last measured step, `captured_bytes` the
    peak of a step that CUDA graphs replayed.
    """
    traffic = cp.traffic
    driver = next((gpu.driver for gpu in after if gpu.driver), "")
    used = usage(world.device, traffic.sent_bytes, traffic.window_bytes, captured_bytes)
    ranks = world.gather(used)
    found = replace(
        figures,
        peak_allocated_bytes=[rank.allocated_bytes for rank in ranks if rank.allocated_bytes is not None],
        peak_reserved_bytes=[rank.reserved_bytes for rank in ranks if rank.reserved_bytes is not None],
        peak_rss_bytes=[rank.rss_bytes for rank in ranks],
        sent_bytes=[rank.sent_bytes for rank in ranks],
        device=device_name(world.device),
        software=software() | ({"driver": driver} if driver else {}),
        gpus=[gpu.digest for gpu in after],
        gpus_before=[gpu.state for gpu in before],
        gpus_after=[gpu.state for gpu in after],
    )
    retries = [rank.retries for rank in ranks]
    if any(retries):
        found.extra[ALLOCATION_RETRIES] = retries
    return found


def of_measured_steps(world: World, steps: Steps, step: list[float], forward: list[float]) -> Measurement:
    """Times of the measured steps on the slowest rank, from this rank's seconds of all steps and of their forwards.
    Collective."""
    step_seconds = world.slowest(step)
    part, extra = measured_part(steps, step_seconds)
    return Measurement(step_seconds=step_seconds[part], forward_seconds=world.slowest(forward[part]), extra=extra)


def l2_flush(device: torch.device) -> Tensor:
    """Memory that, when it is written, replaces the content of a GPU's L2 cache; empty on a CPU."""
    return torch.empty(_L2_FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)


class StepClock:
    """`start`, `mark` at the end of the forward, `stop`; then seconds of forward and of the whole step.

    A step of several forwards marks the start of each further one as well, and gets the sum of their times.

    No rank waits for another here: the slowest rank is found afterwards. `start` waits for CUDA work that was queued
    before it, so that it is not counted: for that of the current stream alone where work of other streams may run from
    one step into the next (`runs_on`).
    """

    def __init__(self, device: torch.device, *, runs_on: bool = False) -> None:
        self._device, self._runs_on = device, runs_on
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        self._marks, self._events = [], []
        self._wait()
        self.mark()

    def _wait(self) -> None:
        if self._device.type != "cuda":
            return
        if self._runs_on:
            torch.cuda.current_stream(self._device).synchronize()
        else:
            torch.cuda.synchronize(self._device)

    def mark(self) -> None:
        """Note this moment, without waiting for the device."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def stop(self) -> tuple[float, float]:
        """(forward_seconds, step_seconds): of all forwards, and from `start` to now with the step's work done."""
        self.mark()
        self._wait()
        if self._device.type == "cuda":
            first, *later = self._events
            elapsed = [first.elapsed_time(event) / 1000 for event in later]  # milliseconds
        else:
            elapsed = [mark - self._marks[0] for mark in self._marks[1:]]
        assert elapsed, "stop() without start()"
        moments = [0.0, *elapsed]
        forwards = zip(moments[::2], moments[1::2], strict=False)  # the time after the last forward has no pair
        return sum(end - start for start, end in forwards), elapsed[-1]


def timed(
    world: World, work: Callable[[StepClock], Result], flush: Tensor | None = None
) -> tuple[Result, tuple[float, float]]:
    """What one call returns, and its (forward_seconds, step_seconds) on this rank, all ranks starting together.

    `work` may mark the end of a forward on the clock that it gets; `flush` is written before it starts (`l2_flush`).
    """
    clock = StepClock(world.device)
    world.barrier()
    if flush is not None:
        flush.zero_()
    clock.start()
    with record_function(STEP):
        return work(clock), clock.stop()


class InsideStep:
    """Progress inside a step that takes long: the layer that the device has reached, forward or backward.

    On a GPU the host runs ahead of the device: what it has launched says nothing of what is done. So each mark is an
    event in the stream, and a thread asks now and then, without waiting, which one the device has passed. No work of a
    step waits for a mark. Steps that take less than REPORT_SECONDS have no marks and no thread: all but the first of
    each length. A step that is replayed as CUDA graphs runs no code of ours, and reports nothing.
    """

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

        def run(x_BLE: Tensor, rotary: Rotary, over_ranks: AttendCall | MixCall) -> Tensor:
            if not self._active:
                return layer(x_BLE, rotary, over_ranks)
            if self._backward:
                self.mark("recompute", **place)
                try:
                    return layer(x_BLE, rotary, over_ranks)
                finally:  # torch ends a recomputation by an exception as soon as it has what it needs
                    self.mark("backward", **place)
            self.mark("forward", **place)
            out_BLE = layer(x_BLE, rotary, over_ranks)
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
