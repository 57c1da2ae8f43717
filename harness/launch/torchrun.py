"""The launcher for hosts on which torchrun has started this program, once per rank: neither Ray nor SSH is used.

The first process of each host, its leader, serves a supervisor of the host's ranks; the others wait and end as it does.
Leaders meet in torchrun's store. The first one then runs the command, with all hosts as one machine; jobs are placed,
watched and judged as on hosts of Ray (`harness.launch.ray.job`).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, InvalidStateError
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from cluster.inventory.checkout import mismatch
from cluster.inventory.site import Site
from harness.base.errors import UsageError
from harness.base.interrupts import SIGNALS
from harness.launch.environment import RECORDED_PREFIXES
from harness.launch.launcher import Job, Outcome
from harness.launch.ports import Listener
from harness.launch.ray.host import PROBE_SECONDS, Description, HostActor
from harness.launch.ray.job import HostsJob, ReservedHost
from harness.launch.ray.watch import HostLost, Member, lost_sentence
from harness.launch.zygote import PR_SET_PDEATHSIG, prctl
from harness.machine.this_machine import Machine, address_towards, together

if TYPE_CHECKING:
    from torch.distributed import Store

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_LINE = (
    "torchrun --nnodes 2 --nproc-per-node 8 --node-rank 0 --master-addr HOST --master-port 29500 "
    "-m harness train CONFIG.yaml --torchrun"
)
JOIN_SECONDS = 300.0  # for the first host: without torchrun its leader keeps the store, and imports torch first
LOST_SECONDS = 20.0  # a host that accepts no connection for so long is lost
_SILENT = f"no word for {LOST_SECONDS:g} s"
_ANSWER_SECONDS = 10.0  # of the store
SHARED_VARIABLE = "BURST_TORCHRUN_SECRET"  # the same on all hosts, if they have one
# Of torchrun and of the leader itself: ranks have others.
_TORCHRUNS = ("TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_", "LOCAL_", "RANK", "WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class Place:
    """One of `ranks` processes, of which each host has `local_ranks` consecutive ones."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    port: int
    master: str  # name or address of the first host

    @property
    def node(self) -> int:
        """Number of this process's host."""
        return self.rank // self.local_ranks

    @property
    def nodes(self) -> int:
        return self.ranks // self.local_ranks

    @property
    def leads(self) -> bool:
        """Whether this process answers for its host."""
        return self.local_rank == 0


def place_of(environment: Mapping[str, str]) -> Place:
    """Raises UsageError when torchrun did not start this process, or its hosts have different numbers of ranks."""
    for name in (*_NUMBERS, "MASTER_ADDR"):
        if not environment.get(name):
            raise UsageError(
                f"--torchrun: {name} is not set, as torchrun sets it for the ranks it starts; start {_LINE}"
            )
        if name in _NUMBERS and not environment[name].isdecimal():
            raise UsageError(f"--torchrun: {name} is {environment[name]!r}, expected a number; start {_LINE}")
    rank, ranks, local_rank, local_ranks, port = (int(environment[name]) for name in _NUMBERS)
    if not 0 < port < 65536:
        raise UsageError(f"--torchrun: MASTER_PORT is {port}, expected 1 to 65535; give another --master-port")
    if not local_ranks or ranks % local_ranks or rank % local_ranks != local_rank:
        raise UsageError(
            f"--torchrun: {local_ranks} of {ranks} ranks are on this host, which is not the same number on every host; "
            "give each the same --nproc-per-node"
        )
    return Place(rank, ranks, local_rank, local_ranks, port, environment["MASTER_ADDR"])


Opened = Callable[[], contextlib.AbstractContextManager[object]]
LostFirst = Callable[[Sequence[tuple[str, str]], str], str]


class TorchrunHost(HostActor):
    """One host's end, served by its leader. `root` is its own directory of the run, which `opened` locks where the
    host does not see the first host's."""

    def __init__(self, place: Place, root: Path, opened: Opened) -> None:
        name = socket.gethostname()
        super().__init__(name, Site(), environment=_own_environment())
        self.place, self._root, self._opened = place, root.absolute(), opened
        self.store: Store | None = None  # kept: other hosts may still read it
        self._held = contextlib.ExitStack()
        self._is_open = False
        self.told = threading.Event()  # that the command has ended, or (of the first host) is to end
        self.code = 1  # of the command
        if "TORCHELASTIC_RUN_ID" in os.environ:  # a torchrun that is killed ends nothing itself: save, and end
            prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)  # it may come once per thread of torchrun
        self._companions = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # the host's other processes, see below
        self._companions.bind(_name(place))
        self._companions.listen(place.local_ranks)

    def describe(self) -> Description:
        return replace(super().describe(), root=str(self._root))

    def sees(self, path: str, content: str, root: str = "") -> bool:
        if root in ("", str(self._root)) and super().sees(path, content):
            return True
        if not self._is_open:
            self._held.enter_context(self._opened())
            self._is_open = True
        return False

    def stage(self, trial_dir: str, files: Mapping[str, bytes]) -> None:
        with contextlib.suppress(FileNotFoundError):  # a start without the first host had this number too
            Path(trial_dir).rename(f"{trial_dir}.{time.time_ns()}")
        super().stage(trial_dir, files)

    def environment(self, part: Job, user: Mapping[str, str], head: str, *, alone: bool) -> dict[str, str]:
        own = {name: value for name, value in _own_environment().items() if name.startswith(RECORDED_PREFIXES)}
        return super().environment(part, own, head, alone=alone)

    def tell(self, code: int = 1) -> None:
        self.code = code
        self.told.set()

    def close(self) -> None:
        super().close()
        self._held.close()

    def leave(self, code: int) -> None:
        """Let the host's other processes end with the command's exit code."""
        self._companions.settimeout(_ANSWER_SECONDS)
        with contextlib.suppress(OSError), self._companions:
            for _ in range(self.place.local_ranks - 1):
                self._companions.accept()[0].send(bytes([code]))


def _own_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_TORCHRUNS)}


class _Manager(BaseManager):
    """Serves a host's end, and reaches that of another: the standard library's remote objects."""


_METHODS = [name for name in dir(TorchrunHost) if not name.startswith("_")]
_Manager.register("host", exposed=_METHODS)


class _Found(NamedTuple):
    """A host that has met the others."""

    name: str
    address: tuple[str, int]  # of its supervisor


class TorchrunMember(Member):
    """A host's supervisor, reached over TCP. What stands for a call's result is a future, HostLost where the host falls
    silent."""

    def __init__(self, name: str, address: tuple[str, int], key: bytes) -> None:
        self.name, self._address = name, address
        self._pending: set[Future[Any]] = set()
        self._over = threading.Event()
        manager = _Manager(address, authkey=key)
        try:
            manager.connect()
            self._proxy = manager.host()  # type: ignore[attr-defined]
        except AuthenticationError as error:
            raise HostLost(
                name, f"has another secret; give all hosts the same ${SHARED_VARIABLE}, or none of them"
            ) from error
        except (OSError, EOFError) as error:
            raise HostLost(name, f"cannot be reached at {address[0]}") from error
        threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, method: str, *arguments: object, **named: object) -> object:
        future: Future[Any] = Future()
        self._pending.add(future)
        threading.Thread(target=self._call, args=(future, method, arguments, named), daemon=True).start()
        return future

    def result(self, begun: object, seconds: float | None = None) -> Any:
        assert isinstance(begun, Future)
        if not wait_for([begun], seconds).done:
            raise HostLost(self.name, f"no answer within {seconds:g} s")
        try:
            return begun.result()
        except (EOFError, ConnectionError) as error:
            raise HostLost(self.name, "the supervisor of its ranks has ended") from error
        except OSError as error:
            raise HostLost(self.name, f"{error.filename or 'a file'}: {error.strerror}") from error

    def end(self) -> None:
        self._over.set()

    def _call(self, future: Future[Any], method: str, arguments: Any, named: Any) -> None:
        with contextlib.suppress(InvalidStateError):  # the host was silent
            try:
                future.set_result(self._proxy._callmethod(method, arguments, named))
            except Exception as error:  # noqa: BLE001 - the caller of `result` gets it
                future.set_exception(error)
        self._pending.discard(future)

    def _watch(self) -> None:
        listener = Listener(*self._address, LOST_SECONDS)
        while not self._over.wait(PROBE_SECONDS):
            if listener.is_lost():
                for future in list(self._pending):
                    with contextlib.suppress(InvalidStateError):  # it has just ended
                        future.set_exception(HostLost(self.name, _SILENT))


class TorchrunLauncher:
    """Of the first host's leader, for all hosts."""

    name = "torchrun"

    def __init__(self, own: TorchrunHost, found: Sequence[_Found], key: bytes) -> None:
        """Raises UsageError where the hosts differ, or one has been lost."""
        self._own, self.head = own, found[0].address
        self._hosts: list[ReservedHost] = []
        self._code = 2  # of the command, as far as it is known
        self._closed = False
        try:
            for one in found:
                member = TorchrunMember(one.name, one.address, key)
                described: Description = member.call("describe")
                self._hosts.append(
                    ReservedHost(
                        name=one.name, address=one.address[0], ranks=own.place.local_ranks,
                        machine=Machine(**described.machine), described=described, member=member,
                    )
                )  # fmt: skip
            check_hosts({host.name: host.described.versions for host in self._hosts})
            self.machine = together([host.machine for host in self._hosts], own.place.local_ranks)
        except (HostLost, UsageError) as error:
            self.close()
            raise UsageError(f"this run cannot start: {error}") from error

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        started, self._code = time.monotonic(), 1
        names = [host.name for host in self._hosts]
        run = HostsJob(job, self._hosts, self, {}, on_progress)
        try:
            status, reason = run.execute()
            lost = run.lost
        except HostLost as error:
            lost = {error.host: error.why}
            status, reason = "node_lost", lost_sentence(lost, {}, [], job.again)
        self._code = {"ok": 0, "refused": 2}.get(status, 1)
        seconds = time.monotonic() - started
        return Outcome(status=status, reason=reason, wall_seconds=seconds, hosts=names, lost=tuple(lost))

    def head_lost(self) -> bool:
        """Never: this is the head. The user may have asked another host to end."""
        if self._own.told.is_set():
            self._own.told.clear()
            raise KeyboardInterrupt
        return False

    def wait(self, begun: Sequence[object], seconds: float, *, every: bool = False) -> list[object]:
        """See `harness.launch.ray.watch.Hosts`."""
        futures = [one for one in begun if isinstance(one, Future)]
        return list(wait_for(futures, seconds, ALL_COMPLETED if every else FIRST_COMPLETED).done)

    def close(self) -> None:
        """End the ranks, and let all processes end with the command's exit code. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for host in self._hosts:
            with contextlib.suppress(HostLost):
                host.member.call("close", seconds=_ANSWER_SECONDS)
                host.member.call("tell", self._code, seconds=_ANSWER_SECONDS)
            host.member.end()
        self._own.leave(self._code)


def torchrun_launcher(place: Place, root: Path, opened: Opened, lost_first: LostFirst) -> TorchrunLauncher:
    """The launcher, on the first host; on the others this serves the host and ends the program with the command's exit
    code, after the sentence that `lost_first` gives, of all hosts' addresses and names and the reason, where the first
    host is lost.

    Raises UsageError when the hosts cannot meet, or differ.
    """
    if not place.leads:
        _accompany(place)
    host = TorchrunHost(place, root, opened)
    try:
        return _met(place, host, lost_first)
    except UsageError:
        host.leave(2)
        raise


def _met(place: Place, host: TorchrunHost, lost_first: LostFirst) -> TorchrunLauncher:
    host.store = store = joined(place, JOIN_SECONDS)
    key, other = _agreed_key(store, place), place.master
    if place.nodes > 1 and not place.node:  # its name may mean loopback here, so look towards the second host
        other = _read(store, "host1", place)[0]
    try:
        address = address_towards(other) if place.nodes > 1 else "127.0.0.1"
    except OSError as error:
        raise UsageError(f"--torchrun: no IPv4 route leads to {other} ({error}); give another --master-addr") from error
    _Manager.register("host", callable=lambda: host, exposed=_METHODS)
    server = _Manager((address, 0), authkey=key).get_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    assert isinstance(server.address, tuple)
    store.set(f"host{place.node}", " ".join(map(str, (*server.address, socket.gethostname()))))
    said = [_read(store, f"host{node}", place) for node in range(place.nodes)]
    names = [name for *_, name in said]
    alike = len(set(names)) < len(names)  # several hosts on one machine
    found = [
        _Found(f"{name}-{node}" if alike else name, (where, int(port))) for node, (where, port, name) in enumerate(said)
    ]
    if place.node:
        _serve(host, found, key, lost_first)
    return TorchrunLauncher(host, found, key)


def _agreed_key(store: Store, place: Place) -> bytes:
    """The key by which supervisors of hosts know each other. A supervisor starts programs for whoever has the key, and
    anyone who reaches the store can read what is there. So a single host does not write its key there. Of several
    hosts, the key is made of what is there and the user's secret, if there is one."""
    if place.nodes == 1:
        return secrets.token_bytes(32)
    if place.rank == 0:
        store.set("key", f"{secrets.token_hex(32)} {place.local_ranks}")
    told, ranks = _read(store, "key", place)
    if int(ranks) != place.local_ranks:
        raise UsageError(
            f"this run cannot start: {ranks} ranks are on {place.master} but {place.local_ranks} on this host; "
            "give every host the same --nproc-per-node"
        )
    return hmac.digest(os.environ.get(SHARED_VARIABLE, "").encode(), bytes.fromhex(told), "sha256")


def _serve(host: TorchrunHost, found: Sequence[_Found], key: bytes, lost_first: LostFirst) -> NoReturn:
    """Serve until the first host says that the command has ended, or is lost. A signal is handed on to it."""
    asked = threading.Event()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: asked.set())
    first, handed_on = Listener(*found[0].address, LOST_SECONDS), False
    while not host.told.wait(0.5):
        if asked.is_set() and not handed_on:
            handed_on = True
            with contextlib.suppress(HostLost):
                TorchrunMember(*found[0], key).call("tell", seconds=_ANSWER_SECONDS)
        if first.is_lost():
            host.close()
            print(lost_first([(one.address[0], one.name) for one in found], _SILENT), file=sys.stderr, flush=True)
            break
    host.close()
    host.leave(host.code)
    sys.stdout.flush()
    os._exit(host.code)


def _name(place: Place) -> str:
    """The abstract name of a socket that connects the processes of one host until their leader ends."""
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"\0burst-{os.getuid()}-{place.master}-{place.port}-{place.node}-{start}"


def _accompany(place: Place) -> NoReturn:
    """Wait for the end of this host's leader, and end with its exit code; with 1 where it was killed."""
    for number in SIGNALS:  # the leader answers them
        signal.signal(number, signal.SIG_IGN)
    give_up = time.monotonic() + JOIN_SECONDS
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as leader, contextlib.suppress(OSError):
        while leader.connect_ex(_name(place)) and time.monotonic() < give_up:
            time.sleep(0.1)
        if code := leader.recv(1):
            os._exit(code[0])
    os._exit(1)


def joined(place: Place, seconds: float) -> Store:
    """A connection to the store that torchrun, else the first leader, keeps on the first host. Raises UsageError when
    there is none within `seconds`."""
    from torch.distributed import PrefixStore, TCPStore

    from engine.distributed import serve_store, store_is_of_agent

    serves = place.rank == 0 and not store_is_of_agent()
    try:
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
    return PrefixStore(f"burst{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _read(store: Store, key: str, place: Place) -> list[str]:
    """The words of a value of the store, waited for. Raises UsageError when it does not come."""
    try:
        store.set_timeout(timedelta(seconds=JOIN_SECONDS))
        return bytes(store.get(key)).decode().split()
    except RuntimeError as error:
        missing = place.master if key == "key" else f"host {key.removeprefix('host')}"
        raise UsageError(f"this run cannot start: {missing} has ended this start or cannot be reached") from error


def check_hosts(versions: Mapping[str, Mapping[str, str | None]]) -> None:
    """Raises UsageError when hosts, by name, have other software."""
    said = {name: {what: found or "absent" for what, found in each.items()} for name, each in versions.items()}
    if why := mismatch(said):
        raise UsageError(why)
