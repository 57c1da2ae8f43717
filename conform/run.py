"""Ranks that answer cases: real processes, one start for all cases of a target, each case with a limit of its own.

An exception of one rank, a rank that dies and a rank that does not answer are results of the case. The ranks are then
started anew for the next one: messages of a broken call could otherwise reach it.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from conform.cases import ConformCase
from conform.compare import Difference, compare
from conform.target import LoadedTarget, load

PASSED, WRONG, ERROR, HANG, NOT_CLAIMED = "passed", "wrong", "error", "hang", "not claimed"
LIMIT_SECONDS = 60.0  # of one case
_START_SECONDS = 120.0  # of all ranks together, with their imports
_GRACE_SECONDS = 3.0  # for the other ranks, once one has failed
_PRELOADED = ["torch", "torch.distributed", "numpy.random", "conform.answer", "conform.cases"]

_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What one case found on one number of ranks. `sentences`: what is wrong, the first first."""

    case: ConformCase
    ranks: int
    status: str
    sentences: tuple[str, ...] = ()
    differences: tuple[dict[str, object], ...] = ()  # the same as data
    trace: str = ""  # of the first rank that raised
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.status in (WRONG, ERROR, HANG)


@dataclass(slots=True)
class _Failure:
    status: str
    sentence: str
    trace: str = ""


@dataclass(slots=True)
class WaitingRanks:
    """A number of ranks that wait for cases. Starts them at the first; use it as a context manager."""

    count: int
    device: str = "cpu"
    limit_seconds: float = LIMIT_SECONDS
    _processes: list[multiprocessing.process.BaseProcess] = field(default_factory=list)
    _ends: list[Connection] = field(default_factory=list)
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> WaitingRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the ranks where they are not running. Returns when all have joined the group."""
        if self._processes:
            return
        _context.set_forkserver_preload(_PRELOADED)
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name, "store"))
        for rank in range(self.count):
            mine, theirs = _context.Pipe()
            arguments = (rank, self.count, self.device, dict(os.environ), store, theirs, self.limit_seconds)
            process = _context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)
        answers = self._collect(_START_SECONDS)
        if isinstance(answers, _Failure):
            self.stop()
            raise RuntimeError(f"ranks did not start: {answers.sentence}")

    def stop(self) -> None:
        """End the ranks."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.kill()
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._ends, self._folder = [], [], None

    def ask(self, target: LoadedTarget, case: ConformCase) -> CaseResult:
        """One case of one target. Never raises for what the target does."""
        case = in_dtype_of(target, case)
        self.start()
        began = time.monotonic()
        for end in self._ends:
            end.send((target.spec, case, self.device))
        answers = self._collect(self.limit_seconds)
        seconds = time.monotonic() - began
        if isinstance(answers, _Failure):
            self.stop()
            return CaseResult(
                case=case, ranks=self.count, status=answers.status, sentences=(answers.sentence,),
                trace=answers.trace, seconds=seconds,
            )  # fmt: skip
        with _one_thread():  # the problems are small, and ranks may still be busy
            wrong = compare(case, answers)  # type: ignore[arg-type]
        return CaseResult(
            case=case,
            ranks=self.count,
            status=WRONG if wrong else PASSED,
            sentences=tuple(each.sentence() for each in wrong),
            differences=tuple(_as_data(each) for each in wrong),
            seconds=seconds,
        )

    def _collect(self, limit_seconds: float) -> list[object] | _Failure:
        """What each rank sent, in order of rank; the first failure, once the others had time to say something."""
        deadline = time.monotonic() + limit_seconds
        found: dict[int, object] = {}
        failed: _Failure | None = None
        open_ends = {end: rank for rank, end in enumerate(self._ends)}
        while open_ends:
            left = deadline - time.monotonic()
            ready = wait(list(open_ends), timeout=max(left, 0.0)) if left > 0 else []
            if not ready:
                break
            for end in ready:
                assert isinstance(end, Connection)
                rank = open_ends.pop(end)
                try:
                    status, value, trace = end.recv()
                except EOFError:
                    self._processes[rank].join(1.0)
                    status, value, trace = ERROR, f"the process ended with {self._processes[rank].exitcode}", ""
                if status == PASSED:
                    found[rank] = value
                elif failed is None:
                    failed = _Failure(status, f"rank {rank}: {value}", trace)
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failed is not None:
            silent = sorted(open_ends.values())
            if silent and len(silent) < self.count:
                failed.sentence += f"; rank {', '.join(map(str, silent))} waited on"
            return failed
        if open_ends:
            silent = sorted(open_ends.values())
            return _Failure(HANG, f"rank {', '.join(map(str, silent))} gave no answer within {limit_seconds:g} s")
        return [found[rank] for rank in range(self.count)]


def in_dtype_of(target: LoadedTarget, case: ConformCase) -> ConformCase:
    """The case, in the dtype of a target that has no kernel for float32."""
    if case.problem.dtype != "fp32" or target.dtype == "fp32" or case.problem.autocast:
        return case
    return replace(case, problem=replace(case.problem, dtype=target.dtype))


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _as_data(difference: Difference) -> dict[str, object]:
    """Without what does not apply, and without NaN, which JSON has not."""
    data = asdict(difference)
    return {name: value for name, value in data.items() if value is not None and value == value}


def _serve(
    rank: int, count: int, device: str, environment: dict[str, str], store: str, end: Connection, limit_seconds: float
) -> None:
    """A rank: answers cases until its parent closes the pipe."""
    os.environ |= environment
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import torch
    import torch.distributed as dist

    from conform.answer import answer

    quiet = os.open(os.devnull, os.O_WRONLY)  # what a system prints would tear the table
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}", rank=rank, world_size=count,
        timeout=datetime.timedelta(seconds=2 * limit_seconds),
    )  # fmt: skip
    dist.barrier()  # connections exist before the first case
    end.send((PASSED, None, ""))
    loaded: dict[str, LoadedTarget] = {}
    while True:
        try:
            spec, case, _ = end.recv()
        except EOFError:
            os._exit(0)
        try:
            if spec not in loaded:
                loaded[spec] = load(spec)
            end.send((PASSED, answer(loaded[spec], case), ""))
        except BaseException as error:  # noqa: BLE001 - whatever a target raises is its result
            said = str(error).strip().splitlines() or [""]
            end.send((ERROR, f"{type(error).__name__}: {said[0]}", traceback.format_exc()))


def run(
    target: LoadedTarget,
    cases: Sequence[ConformCase],
    *,
    ranks: Sequence[int] | None = None,
    device: str = "cpu",
    limit_seconds: float = LIMIT_SECONDS,
    seen: Callable[[CaseResult], None] | None = None,
) -> list[CaseResult]:
    """The result of every case on every number of ranks that the target has. `seen` gets each as it is found."""
    found = []
    cases = [in_dtype_of(target, case) for case in cases]
    for count in ranks or target.ranks:
        with WaitingRanks(count, device, limit_seconds) as there:
            for result in _of_ranks(there, target, cases, count):
                found.append(result)
                if seen is not None:
                    seen(result)
    return found


def _of_ranks(
    there: WaitingRanks, target: LoadedTarget, cases: Sequence[ConformCase], count: int
) -> Iterator[CaseResult]:
    for case in cases:
        if absent := sorted(case.needs(count) - target.capabilities):
            said = (f"the target does not claim {', '.join(absent)}",)
            yield CaseResult(case=case, ranks=count, status=NOT_CLAIMED, sentences=said)
        else:
            yield there.ask(target, case)
