"""Ranks that answer cases: processes that are started once for all cases of a target; each case has its own limit.

An exception of one rank, a rank that dies and a rank that does not answer are results of the case. The ranks are then
started anew for the next one: messages of a broken call could otherwise reach it.
"""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from conform.cases import ConformCase
from conform.compare import Difference, compare
from conform.target import LoadedTarget, load

PASSED, WRONG, ERROR, HANG, NOT_CLAIMED = "passed", "wrong", "error", "hang", "not claimed"
LIMIT_SECONDS = 60.0  # of one case
_START_SECONDS = 120.0  # of all ranks together, with their imports
_GRACE_SECONDS = 3.0  # for the other ranks, once one has failed
_STACK_SECONDS = 0.5  # for ranks that are asked where they are
_WHERE = signal.SIGUSR1  # at which a rank writes its stack to a file
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')  # of a stack that faulthandler writes
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
    died: bool = False  # the rank, which other ranks then report as a lost connection


class NotStarted(Exception):
    """The ranks did not start; the text says why."""


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
        for rank in range(self.count):
            mine, theirs = _context.Pipe()
            arguments = (rank, self.count, self.device, dict(os.environ), self._folder.name, theirs, self.limit_seconds)
            process = _context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)
        answers = self._collect(_START_SECONDS)
        if isinstance(answers, _Failure):
            self.stop()
            raise NotStarted(f"{self.count} ranks on {self.device} did not start: {answers.sentence}")

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
            end.send((target.spec, case))
        answers = self._collect(self.limit_seconds, str(target.module.__file__))
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

    def _collect(self, limit_seconds: float, file: str = "") -> list[object] | _Failure:
        """What each rank sent, in order of rank. Where ranks failed, the first failure; or the death of a rank shortly
        after it, which the other ranks notice first. `file` is the target's."""
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
                    failure = _Failure(ERROR, f"rank {rank}: {self._how_ended(rank)}", died=True)
                else:
                    if status == PASSED:
                        found[rank] = value
                        continue
                    failure = _Failure(status, f"rank {rank}: {value}", trace)
                if failed is None or (failure.died and not failed.died):
                    failed = failure
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        silent = sorted(open_ends.values())
        if failed is not None:
            if silent and len(silent) < self.count:
                failed.sentence += f"; rank {', '.join(map(str, silent))} still waited"
            return failed
        if silent:
            return self._hang(silent, limit_seconds, file)
        return [found[rank] for rank in range(self.count)]

    def _how_ended(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(1.0)
        code = process.exitcode
        if code is None or code >= 0:
            return f"the process ended with exit code {code}"
        return f"the process was ended by {signal.Signals(-code).name}"

    def _hang(self, silent: Sequence[int], limit_seconds: float, file: str) -> _Failure:
        """Of ranks that gave no answer, with the place in the target's file where each of them is."""
        assert self._folder is not None
        for rank in silent:
            pid = self._processes[rank].pid
            assert pid is not None
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(pid, _WHERE)
        time.sleep(_STACK_SECONDS)
        stacks = {rank: _read_stack(self._folder.name, rank) for rank in silent}
        sentence = f"rank {', '.join(map(str, silent))} gave no answer within {limit_seconds:g} s"
        for rank, stack in stacks.items():
            frames = _FRAME.findall(stack)
            own = [frame for frame in frames if frame[0] == file] or frames
            if own:
                path, line, function = own[0]
                sentence += f"; rank {rank} is in {function} ({Path(path).name}:{line})"
        return _Failure(HANG, sentence, "\n".join(f"rank {rank}: {stack}" for rank, stack in stacks.items()))


def _stack_path(folder: str, rank: int) -> Path:
    return Path(folder, f"stack{rank}")


def _read_stack(folder: str, rank: int) -> str:
    """The stack that a rank wrote; nothing where it could not."""
    path = _stack_path(folder, rank)
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


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


def backend_of(device: str, ranks: int, gpus: int) -> str:
    """NCCL where each rank has a GPU of its own. It refuses two ranks on one; gloo sends the tensors of such ranks
    through host memory, in collectives alone. Raises ValueError where there is no GPU."""
    if device != "cuda":
        return "gloo"
    if not gpus:
        raise ValueError("--device cuda needs a GPU, and torch finds none here; leave it out for ranks on the CPU")
    return "nccl" if ranks <= gpus else "gloo"


def _join(rank: int, count: int, device: str, environment: dict[str, str], folder: str, limit_seconds: float) -> None:
    """Become a rank: its environment, device and process group. Returns once all ranks are connected."""
    os.environ |= environment
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import torch
    import torch.distributed as dist

    quiet = os.open(os.devnull, os.O_WRONLY)  # what a system prints would tear the table
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    backend = backend_of(device, count, gpus)
    if gpus:
        torch.cuda.set_device(rank % gpus)
    dist.init_process_group(
        backend, init_method=f"file://{Path(folder, 'store')}", rank=rank, world_size=count,
        timeout=datetime.timedelta(seconds=2 * limit_seconds),
    )  # fmt: skip
    dist.barrier(device_ids=[rank] if backend == "nccl" else None)  # connections exist before the first case


def _serve(
    rank: int, count: int, device: str, environment: dict[str, str], folder: str, end: Connection, limit_seconds: float
) -> None:
    """A rank: answers cases until its parent closes the pipe."""
    with open(_stack_path(folder, rank), "w", encoding="utf-8") as stack:
        faulthandler.register(_WHERE, file=stack, all_threads=False)
        _answer(end, partial(_join, rank, count, device, environment, folder, limit_seconds))
        from conform.answer import answer

        loaded: dict[str, LoadedTarget] = {}

        def of_case(spec: str, case: ConformCase) -> object:
            if spec not in loaded:
                loaded[spec] = load(spec)
            return answer(loaded[spec], case, device)

        while True:
            try:
                asked = end.recv()
            except EOFError:
                os._exit(0)
            _answer(end, partial(of_case, *asked))


def _answer(end: Connection, work: Callable[[], object]) -> None:
    """Send what `work` returns, or what it raised."""
    try:
        end.send((PASSED, work(), ""))
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
) -> Generator[CaseResult, None, None]:
    """The result of every case on every number of ranks that the target has, each as it is found. Closed before its
    end, it ends the ranks."""
    cases = [in_dtype_of(target, case) for case in cases]
    for count in ranks or target.ranks:
        with WaitingRanks(count, device, limit_seconds) as there:
            yield from _of_ranks(there, target, cases, count)


def _of_ranks(
    there: WaitingRanks, target: LoadedTarget, cases: Sequence[ConformCase], count: int
) -> Iterator[CaseResult]:
    for case in cases:
        if absent := sorted(case.needs(count) - target.capabilities):
            said = (f"the target does not claim {', '.join(absent)}",)
            yield CaseResult(case=case, ranks=count, status=NOT_CLAIMED, sentences=said)
        else:
            yield there.ask(target, case)
