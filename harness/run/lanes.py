"""The lanes of a run: disjoint parts of a machine that execute one trial each at the same time.

A trial that needs more than a lane has runs alone, on the whole machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import TracebackType
from typing import Protocol, TypeVar, runtime_checkable

from harness.base.errors import UsageError
from harness.launch.launcher import Launcher
from harness.launch.supervisor import LocalLauncher, Supervisor
from harness.machine.this_machine import Machine
from harness.records.record import Record
from harness.run.attempt import RunContext
from harness.spec.trial import Trial

T = TypeVar("T")

POLL_SECONDS = 0.2


@runtime_checkable
class DividesHosts(Protocol):
    """A launcher of several hosts that can run jobs on parts of them at the same time."""

    def lanes(self, number: int) -> list[tuple[Machine, Launcher]]:
        """So many equal parts, each as a machine with its launcher."""
        ...


class Lanes:
    """Executes trials on the lanes of a run; with none, one after another on the whole machine, in this thread."""

    def __init__(self, lanes: Sequence[RunContext], whole: RunContext) -> None:
        self._idle = list(lanes)
        self._lane = lanes[0].machine if lanes else None  # all are equal
        self._whole = whole
        self._executor = ThreadPoolExecutor(max(1, len(lanes)), thread_name_prefix="lane")
        self._futures: dict[Future[Record], tuple[Trial, RunContext]] = {}
        self._done: list[tuple[Trial, Record]] = []  # of the whole machine, in this thread

    def __enter__(self) -> Lanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            for _, lane in self._futures.values():
                if isinstance(lane.launcher, LocalLauncher):
                    lane.launcher.cancel()
        self._executor.shutdown(wait=True)  # a signal ends the trials of all lanes: each looks for one

    @property
    def running(self) -> list[Trial]:
        """Trials that were started and not yet returned by `finished`."""
        return [trial for trial, _ in (*self._futures.values(), *self._done)]

    @property
    def full(self) -> bool:
        """Whether no trial could start now, whatever it needs."""
        return bool(self._done) or (self._lane is not None and not self._idle)

    def takes(self, trial: Trial) -> bool:
        """Whether the trial could start now."""
        if self._done:  # a trial of the whole machine, which is there as soon as it was started
            return False
        return bool(self._idle) if self._fits(trial) else not self._futures

    def start(self, trial: Trial, work: Callable[[RunContext], Record]) -> None:
        """Run `work` with the lane that takes the trial."""
        assert self.takes(trial), trial.id
        if not self._fits(trial):
            self._done.append((trial, work(self._whole)))
            return
        lane = self._idle.pop(0)
        self._futures[self._executor.submit(work, lane)] = (trial, lane)

    def finished(self) -> list[tuple[Trial, Record]]:
        """Trials that have ended, with their records; waits for one. An error of one is raised when all have ended."""
        found, self._done = self._done, []
        while not found:
            over, _ = wait(self._futures, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in over:
                trial, lane = self._futures.pop(future)
                self._idle.append(lane)
                found.append((trial, future.result()))
        return found

    def _fits(self, trial: Trial) -> bool:
        """Whether a lane has what the trial needs."""
        return self._lane is not None and self._lane.nodes_for(trial.settings.world_size) is not None


def lanes_of(host: RunContext, number: int) -> list[RunContext]:
    """The machine in `number` equal parts with disjoint GPUs and cores, each with a launcher of its own.

    Of a cluster each lane has hosts of its own. Raises UsageError where there are fewer hosts, GPUs, or without GPUs
    cores.
    """
    machine = host.machine
    if isinstance(host.launcher, DividesHosts):
        if number > machine.nodes:
            raise UsageError(
                f"--parallel {number}: the cluster has {machine.nodes} usable hosts; give at most that many lanes"
            )
        return [
            replace(host, machine=part, launcher=launcher, lanes=number)
            for part, launcher in host.launcher.lanes(number)
        ]
    units, what = (machine.gpu_count, "GPUs") if machine.device == "cuda" else (machine.cores, "cores")
    if number > units:
        raise UsageError(f"--parallel {number}: this machine has {units} {what}; give at most that many lanes")
    gpus = _visible(host, machine)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    lanes = []
    for lane in range(number):
        own_cores = _share(cores, lane, number) if len(cores) >= number else cores
        own_gpus = _share(gpus, lane, number)
        environment = dict(host.environment)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(own_gpus)
        lanes.append(
            replace(
                host,
                machine=replace(
                    machine,
                    cores=max(1, machine.cores // number),
                    memory_gib=machine.memory_gib / number,
                    gpu_count=len(own_gpus),
                ),
                launcher=LocalLauncher(Supervisor(cores=own_cores)),
                environment=environment,
                lanes=number,
            )
        )
    return lanes


def _share(items: Sequence[T], lane: int, number: int) -> list[T]:
    """A lane's part: as many for each, consecutive ones, so that they are near to each other."""
    size = len(items) // number
    return list(items[lane * size : (lane + 1) * size])


def _visible(host: RunContext, machine: Machine) -> list[str]:
    """The machine's GPUs as CUDA_VISIBLE_DEVICES names them."""
    given = host.environment.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(machine.gpu_count)] if given is None else given.split(",")
    return [name.strip() for name in names[: machine.gpu_count]]
