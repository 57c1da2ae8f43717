"""`burst train --torchrun`: this process is one rank, which torchrun started; neither Ray nor SSH is used.

Rank 0 checks and plans the run, as `harness.training.run` does for ranks that it starts, and gives the order to the
others through torchrun's store. One rank per host, its leader, opens the run directory there, unless an earlier host
shares it, and watches the other hosts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from cluster.files.errors import shown
from cluster.inventory.checkout import code_digest, mismatch
from engine.measurement import write_json
from engine.reader import from_json
from engine.training.config import Order
from engine.training.files import OUTCOME_FILE, RUN_FILE, attempt_directory, checkpoints_directory
from engine.training.manifest import checkpoints
from engine.training.preflight import check_start
from harness.base.errors import UsageError
from harness.base.interrupts import SIGNALS
from harness.base.terminal import stderr_console
from harness.launch.environment import render
from harness.machine.this_machine import Machine, discover, route_towards, together
from harness.records.provenance import PROJECT_ROOT, commit
from harness.run.directory import opened_for_writing, refuse_no_run
from harness.training.file import TrainingFile
from harness.training.hosts import LOST_SECONDS, HostsWatch, Place, beat_key, ended_key, follow, place_of
from harness.training.planning import settings_that_fit
from harness.training.progress import TrainingView
from harness.training.run import (
    describe_run,
    new_attempt,
    next_step,
    planned_order,
    refuse_checkpoints,
    refusing,
    stop_time,
)

if TYPE_CHECKING:
    from torch.distributed import Store

    from engine.training.loop import StopRequest, TrainingRun

_REFUSED = "refused"
_POLL_SECONDS = 0.1
_JOIN_SECONDS = 300.0  # for the first host: without torchrun its rank 0 keeps the store, and imports torch first
_ANSWER_SECONDS = 10.0  # of the store; a host that answers later is lost
_Found = TypeVar("_Found")


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """Of the ranks of a host that all meet the same error of the user, one says it."""
    try:
        yield
    except UsageError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            raise SystemExit(2) from None
        raise


def train_as_rank(file: TrainingFile, run_dir: Path, *, resume: bool, again: Sequence[str]) -> int:
    """Run this rank to its end, which ends the process. Raises UsageError on a rank that says why a run is refused;
    the others then end with its exit code."""
    place, settings = place_of(os.environ), file.config.settings
    if settings.world_size != place.ranks:
        raise UsageError(
            f"{file.path} has world_size {settings.world_size}, but torchrun started {place.ranks} ranks; "
            f"start as many, or give --set world_size={place.ranks} with a cp_size that divides it"
        )
    machine = discover()
    address, interface = route_towards(place.master) if place.nodes > 1 else ("", "")
    values = render(settings, device=machine.device, cores=machine.cores, host_ranks=place.local_ranks, user=os.environ)
    if interface:
        values = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} | values
    for name, value in values.items():  # before torch is imported, which reads some of them then
        os.environ.setdefault(name, value)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    resume |= restarted and bool(checkpoints(checkpoints_directory(run_dir)))
    return _Rank(file, place, machine, address, run_dir, resume, again).run()


class _Rank:
    """One rank of a start."""

    def __init__(
        self,
        file: TrainingFile,
        place: Place,
        machine: Machine,
        address: str,
        run_dir: Path,
        resume: bool,
        again: Sequence[str],
    ) -> None:
        self._file, self._place, self._machine, self._address = file, place, machine, address
        self._run_dir, self._resume, self._again = run_dir, resume, again
        self._store = joined(place, _JOIN_SECONDS)
        self._hosts: list[dict[str, Any]] = []
        self._over = threading.Event()
        self._training: TrainingRun | None = None
        self._closing = contextlib.ExitStack()

    def run(self) -> NoReturn:
        with self._closing:
            whole = self._introduce()
            if self._place.leads:
                watch = HostsWatch(
                    lambda: connection(self._place, _ANSWER_SECONDS), self._place.node, self._place.nodes, self._lost
                )
                self._closing.callback(watch.stop)
            else:
                follow(self._hosts[self._place.node]["leader"], self._over)
            self._closing.callback(self._over.set)
            attempt, order = self._begin(whole)
            self._train(attempt, order)

    def _introduce(self) -> Machine:
        """Meet the other hosts and compare their software; returns all of them as one machine."""
        import torch

        place = self._place
        if place.leads:
            versions = {
                "python": ".".join(map(str, sys.version_info[:3])),
                "torch": str(torch.__version__),
                "code": code_digest(PROJECT_ROOT),
            }
            self._store.set(beat_key(place.node), "0")
            self._put(
                f"host{place.node}",
                {
                    "name": socket.gethostname(),
                    "address": self._address,
                    "leader": os.getpid(),
                    "ranks": place.local_ranks,
                    "versions": versions,
                    "machine": dataclasses.asdict(self._machine),
                },
            )
        self._hosts = [self._get(f"host{node}") for node in range(place.nodes)]
        machines = [Machine(**host["machine"]) for host in self._hosts]
        if place.nodes == 1:
            return machines[0]
        if place.rank == 0:
            self._refusing(lambda: check_hosts(self._hosts))
        return self._refusing(lambda: together(machines, place.local_ranks), says=place.rank == 0)

    def _begin(self, whole: Machine) -> tuple[Path, Order]:
        """Open the run directory, once per storage; returns the directory of this start there, and its order."""
        place = self._place
        if place.rank == 0:
            self._put("order", dataclasses.asdict(self._refusing(lambda: self._planned(whole))))
        order = from_json(Order, self._get("order"))
        if place.leads:  # one host after the other, so that each sees what earlier ones have opened
            earlier = [self._get(f"opened{node}") for node in range(place.node)]
            seen = next((one for one in earlier if (self._run_dir / one["mark"]).exists()), None)
            if seen is None:
                seen = self._refusing(lambda: self._opened(order))
            self._put(f"opened{place.node}", seen)
        number = self._get(f"opened{place.node}")["number"]
        return attempt_directory(self._run_dir, number).absolute(), order

    def _planned(self, whole: Machine) -> Order:
        """The order, after all checks that need no ranks. Raises UsageError."""
        if self._resume and self._place.nodes == 1:  # of several hosts another one may hold the run
            refuse_no_run(self._run_dir, RUN_FILE)
        order = planned_order(self._file.config, whole, self._run_dir, resume=self._resume)
        with refusing():
            facts = check_start(order)
        if self._resume:
            refuse_checkpoints(order.config, facts, self._run_dir, elsewhere=self._place.nodes > 1)
        return order

    def _opened(self, order: Order) -> dict[str, Any]:
        """Lock this host's run directory, move an earlier run aside unless it is resumed, and describe the start."""
        # On several hosts with directories of their own, one that is new may resume from another's checkpoint.
        resume = self._resume and (self._place.nodes == 1 or (self._run_dir / RUN_FILE).is_file())
        _, moved = self._closing.enter_context(opened_for_writing(self._run_dir, resume=resume, marker=RUN_FILE))
        if moved is not None:
            _say(f"the earlier run in {self._run_dir} is now {moved}")
        describe_run(self._run_dir, order.config, commit())
        attempt = new_attempt(self._run_dir, order)
        mark = attempt / f".opened-{secrets.token_hex(8)}"
        mark.touch()
        self._closing.callback(mark.unlink, missing_ok=True)
        return {"mark": str(mark.relative_to(self._run_dir.absolute())), "number": int(attempt.name)}

    def _train(self, attempt: Path, order: Order) -> NoReturn:
        from engine.distributed import leave, wait_for_all
        from engine.tasks.task import progress_to
        from engine.training.loop import StopRequest, set_up
        from engine.worker import exit_on_error, silent

        rank, record = self._place.rank, progress_to(attempt)
        view = TrainingView(stderr_console(), order.config.steps)

        def progressed(line: dict[str, object]) -> None:
            record(line)
            view(line)

        with exit_on_error(attempt, rank), self._explained():
            stop = StopRequest([number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN])
            self._training = set_up(attempt, stop)
            with view if rank == 0 else contextlib.nullcontext(), self._ending_with_the_job(stop):
                finished = self._training.run(progressed if rank == 0 else silent)
            self._over.set()
            wait_for_all()  # no rank follows its leader any more
            if rank == 0:
                write_json(attempt / OUTCOME_FILE, {"step": self._training.steps_done, "finished": finished})
                if finished:
                    print(f"Trained: {self._run_dir}")
                else:
                    _say(f"stopped; {self._next_alike()}")
            self._closing.close()
            wait_for_all()  # no host watches any more, and takes an end for a loss
            if not finished:
                sys.stdout.flush()
                os._exit(1)
            leave()
        raise AssertionError("a rank does not outlive its run")

    def _ending_with_the_job(self, stop: StopRequest) -> contextlib.AbstractContextManager[None]:
        """A block during which all ranks are asked to stop, by rank 0, ahead of the end of a Slurm job."""
        ending = stop_time(_say, self._file.config.save.grace_seconds) if self._place.rank == 0 else None
        if ending is None:
            return contextlib.nullcontext()

        def ask() -> None:
            _say(f"stopping ahead of {ending.option}: the step under way is finished and saved")
            stop.asked = True

        return ending.calling(ask)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Before a rank ends with an error: a refusal is said once, and an error that a lost host may have caused waits
        until the watch has found one, or another host says that it ends by itself."""
        from engine.tasks.task import Refused

        try:
            yield
        except Refused as error:
            self._over.set()
            if self._is_first("refusals"):
                _say(f"burst: this run cannot start: {error}")
            self._closing.close()
            time.sleep(_POLL_SECONDS)
            os._exit(2)
        except (ValueError, OSError, ArithmeticError, MemoryError):
            self._put_end()
            raise
        except Exception:  # of torch, on any rank: its own, or one about a peer that is gone
            self._put_end()
            self._await_word()
            raise

    def _is_first(self, key: str) -> bool:
        """Whether no other rank has asked this before."""
        try:
            return int(self._store.add(key, 1)) == 1
        except RuntimeError:  # the store is gone: better said twice than never
            return True

    def _put_end(self) -> None:
        """Tell the other hosts that this one ends by itself."""
        with contextlib.suppress(RuntimeError):
            self._store.set(ended_key(self._place.node), "1")

    def _await_word(self) -> None:
        until = time.monotonic() + LOST_SECONDS + 2 * _ANSWER_SECONDS
        others = [ended_key(node) for node in range(self._place.nodes) if node != self._place.node]
        while others and time.monotonic() < until:
            with contextlib.suppress(RuntimeError):  # the watch finds out
                if any(self._store.check([key]) for key in others):
                    return
            time.sleep(1.0)

    def _lost(self, node: int, why: str) -> NoReturn:
        """End this host's ranks, after one sentence that names the lost host and the next command. Of the leader."""
        done = self._training.steps_done if self._training is not None else 0
        after = f" after step {done} of {self._file.config.steps}" if done else ""
        if node == self._place.node:  # its ranks run on without a store
            _say(f"the ranks on {self._hosts[node]['name']} end{after}, because {why}; {self._next_alike()}")
        else:
            _say(f"{self._hosts[node]['name']} was lost ({why}){after}; {self._next(node)}")
        sys.stderr.flush()
        os._exit(1)

    def _next_alike(self) -> str:
        """What is saved, and the line that goes on with the same hosts."""
        return next_step(self._run_dir, self._line(self._place, self._place.node))

    def _next(self, lost: int) -> str:
        """What is saved, and the line that goes on without a host, for this one."""
        left = [node for node in range(self._place.nodes) if node != lost]
        machine = dataclasses.replace(self._machine, nodes=len(left), ranks_per_node=self._place.local_ranks)
        changes = settings_that_fit(self._file.config, machine)
        if changes is None:
            return self._next_alike()
        ranks = changes.get("world_size", self._place.ranks)
        nodes = machine.nodes_for(ranks) or 1
        number, first = left.index(self._place.node), self._hosts[left[0]]
        if number >= nodes:
            return f"the run goes on without this host, by the command that {first['name']} prints"
        place = dataclasses.replace(
            self._place,
            ranks=ranks,
            local_ranks=ranks // nodes,
            master=self._place.master if left[0] == 0 else first["address"] or first["name"],
        )
        return next_step(self._run_dir, self._line(place, number), changes)

    def _line(self, place: Place, node: int) -> list[str]:
        """The command line that starts the ranks of a host."""
        return [
            *("torchrun", "--nnodes", str(place.nodes), "--nproc-per-node", str(place.local_ranks)),
            *("--node-rank", str(node), "--master-addr", place.master, "--master-port", str(place.port)),
            *("-m", "harness", *self._again[1:]),
        ]

    def _refusing(self, check: Callable[[], _Found], *, says: bool = True) -> _Found:
        """The result of a check. A UsageError ends all ranks, and this one says it."""
        try:
            return check()
        except UsageError as error:
            self._put(_REFUSED, str(error))
            if not says:
                raise SystemExit(2) from None
            time.sleep(2 * _POLL_SECONDS)  # the store may end with this rank, and the others are to read it
            raise

    def _put(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> Any:
        """A value of the store, waited for. Ends this rank where the run is refused."""
        try:
            while not self._store.check([key]):
                if self._store.check([_REFUSED]):
                    raise SystemExit(2)
                time.sleep(_POLL_SECONDS)
            return json.loads(self._store.get(key))
        except RuntimeError as error:
            if not self._place.leads:
                raise SystemExit(1) from error
            raise UsageError(
                f"the first host, {self._place.master}, has ended this start or cannot be reached; see its output"
            ) from error


def joined(place: Place, seconds: float) -> Store:
    """The main thread's connection to the store. Raises UsageError when there is none within `seconds`."""
    try:
        store = connection(place, seconds)
    except (OSError, RuntimeError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        if place.rank == 0:
            raise UsageError(
                f"--torchrun: rank 0 cannot use port {place.port} of {place.master} ({why}); give this host's address "
                "as --master-addr, and a free port as --master-port"
            ) from error
        raise UsageError(
            f"--torchrun: the first host, {place.master}, does not answer at port {place.port} within {seconds:g} s "
            f"({why}); start its ranks at the same time, and give all hosts its --master-addr and --master-port"
        ) from error
    store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
    return store


def connection(place: Place, seconds: float) -> Store:
    """Of one thread, to the store that torchrun, else rank 0, keeps on the first host. It gives up after `seconds`."""
    from torch.distributed import PrefixStore, TCPStore

    from engine.distributed import serve_store, store_is_of_agent

    serves = place.rank == 0 and not store_is_of_agent()
    if serves:
        serve_store(place.master, place.port)
    store = TCPStore(
        place.master,
        place.port,
        is_master=serves,
        wait_for_workers=False,
        multi_tenant=True,
        timeout=timedelta(seconds=seconds),
    )
    return PrefixStore(f"burst{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def check_hosts(hosts: Sequence[dict[str, Any]]) -> None:
    """Raises UsageError when hosts have other software, or another number of ranks."""
    if why := mismatch({host["name"]: host["versions"] for host in hosts}):
        raise UsageError(f"this run cannot start: {why}")
    numbers = {host["name"]: host["ranks"] for host in hosts}
    if len(set(numbers.values())) > 1:
        found = ", ".join(f"{number} on {name}" for name, number in numbers.items())
        raise UsageError(f"this run cannot start: ranks are {found}; give every host the same --nproc-per-node")


def _say(sentence: str) -> None:
    print(shown(sentence), file=sys.stderr, flush=True)
