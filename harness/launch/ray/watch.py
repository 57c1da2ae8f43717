"""One job on several hosts: calls to their supervisors with a deadline each, and their observations merged as if one
host had made them."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from harness.base.interrupts import look
from harness.launch.launcher import Job, Part, longest_seconds
from harness.launch.verdict import Watched, after_step

POLL_SECONDS = 0.2
FAILURE_SECONDS = 4.0  # from one host's failure, for the other hosts to notice it and write their errors
CALL_SECONDS = 60.0  # a host that does not answer a short question for so long is lost
PROGRESS_SECONDS = 3.0  # for the newest lines of progress; what comes later is read the next time
ENDING_SECONDS = 30.0
PIECE_BYTES = 16 * 2**20  # of one file and call: in the memory of both hosts at that time
HEADLESS_SECONDS = 10.0  # for the ranks on the other hosts to end
CLOCKS_APART_SECONDS = 1.0  # difference of clocks that `burst cluster check` accepts without a warning


class HostLost(Exception):
    """A host whose supervisor is gone or silent."""

    def __init__(self, host: str, why: str) -> None:
        super().__init__(f"{host}: {why}")
        self.host = host
        self.why = why


class Member(ABC):
    """One host's supervisor (`harness.launch.ray.host.HostActor`), wherever it runs."""

    name: str

    @abstractmethod
    def begin(self, method: str, *arguments: object, **named: object) -> object:
        """Call a method; returns what stands for its result."""

    @abstractmethod
    def result(self, begun: object, seconds: float | None = None) -> Any:
        """The result of a call that was begun. Raises HostLost when the host is gone, or silent for `seconds`."""

    @abstractmethod
    def end(self) -> None:
        """End the supervisor if it runs."""

    def call(self, method: str, *arguments: object, seconds: float = CALL_SECONDS, **named: object) -> Any:
        """The result of one short call. Raises HostLost."""
        return self.result(self.begin(method, *arguments, **named), seconds)


class Hosts(Protocol):
    """What the hosts of a job have in common."""

    @property
    def head(self) -> tuple[str, int]:
        """Address and port without which hosts end their ranks."""
        ...

    def head_lost(self) -> bool: ...

    def wait(self, begun: Sequence[object], seconds: float, *, every: bool = False) -> list[object]:
        """Those calls that have ended, waiting up to `seconds` for the first, or for every one."""
        ...


class HostFolder:
    """See `harness.launch.launcher.Folder`. Every method raises HostLost."""

    def __init__(self, member: Member, path: str, *, first: bool) -> None:
        self._member = member
        self.host = member.name
        self.path = path
        self.first = first

    def files(self) -> dict[str, int]:
        return cast(dict[str, int], self._member.call("files", self.path))

    def read(self, name: str) -> Iterator[bytes]:
        first = 0
        while True:
            piece = cast(bytes | None, self._member.call("read", f"{self.path}/{name}", first, PIECE_BYTES))
            if piece is None:
                raise FileNotFoundError(f"{name} is gone from {self.host}")
            yield piece
            first += len(piece)
            if len(piece) < PIECE_BYTES:
                return

    def write(self, name: str, pieces: Iterable[bytes]) -> None:
        first = 0
        for piece in pieces:
            self._member.call("write", f"{self.path}/{name}", first, piece)
            first += len(piece)

    def remove(self) -> None:
        self._member.call("remove", self.path)


class JobWatch:
    """Starts the parts of one job and waits for them; ends all others when one fails or is lost."""

    def __init__(
        self,
        parts: Sequence[tuple[Member, Job]],
        connection: Hosts,
        on_progress: Callable[[dict[str, object]], None] | None,
    ) -> None:
        self._parts = parts
        self._connection = connection
        self._on_progress = on_progress
        self._progress_seen = 0
        self._pending: dict[object, tuple[Member, Job]] = {}
        self.seen: dict[str, Watched] = {}  # by host
        self.lost: dict[str, str] = {}  # by host: why
        self.head_lost = False
        self.last_progress: dict[str, object] = {}

    def run(self) -> None:
        """Return when every part has ended, or its host or the head is lost. Ctrl-C ends the parts first and is then
        re-raised."""
        head = self._connection.head
        self._pending = {member.begin("watch", job, head): (member, job) for member, job in self._parts}
        give_up = time.monotonic() + max(longest_seconds(job) for _, job in self._parts) + 2 * ENDING_SECONDS
        trouble_at: float | None = None
        cancelled = False
        try:
            while self._pending:
                look()
                self._collect()
                self._report_progress()
                self._probe_head()
                now = time.monotonic()
                if trouble_at is None and self._trouble():
                    trouble_at = now
                if trouble_at is not None and not cancelled and (self.lost or now - trouble_at > FAILURE_SECONDS):
                    self._cancel(may_save=False)
                    cancelled, give_up = True, now + ENDING_SECONDS
                if now > give_up:
                    self._lose_silent("it did not answer long after the end of the trial")
        except HostLost:
            raise
        except BaseException:  # Ctrl-C, or on_progress raised: the ranks end first
            self._cancel(may_save=True)
            grace = max(job.grace_seconds or 0.0 for _, job in self._parts)
            self._connection.wait(list(self._pending), grace + ENDING_SECONDS, every=True)
            raise

    def _collect(self) -> None:
        for reference in self._connection.wait(list(self._pending), POLL_SECONDS):
            member, _ = self._pending.pop(reference)
            try:
                self.seen[member.name] = member.result(reference)
            except HostLost as loss:
                self.lost[member.name] = loss.why

    def _report_progress(self) -> None:
        """New lines from rank 0's host."""
        member, _ = self._parts[0]
        if member.name in self.lost:
            return
        with contextlib.suppress(HostLost):  # slow is not lost; a loss shows in the part itself
            for line in member.call("progress", self._progress_seen, seconds=PROGRESS_SECONDS):
                self._progress_seen += 1
                self.last_progress = line
                if self._on_progress is not None:
                    self._on_progress(line)

    def _probe_head(self) -> None:
        if self._pending and self._connection.head_lost():
            # Calls to supervisors need no head, so the ranks are ended; no message of a loss would arrive.
            self.head_lost = True
            self._cancel(may_save=False)
            self._connection.wait(list(self._pending), HEADLESS_SECONDS, every=True)
            self._pending.clear()

    def _trouble(self) -> bool:
        shares = {member.name: len(job.own_ranks) for member, job in self._parts}
        return bool(self.lost) or any(troubled(seen, shares[host]) for host, seen in self.seen.items())

    def _cancel(self, *, may_save: bool) -> None:
        late = any(seen.passed is not None for seen in self.seen.values())  # then it helps where the others are
        for member, _ in self._pending.values():
            member.begin("cancel", late, may_save)

    def _lose_silent(self, why: str) -> None:
        for member, _ in self._pending.values():
            self.lost[member.name] = why
        self._pending.clear()


def split(job: Job, *, hosts: int, address: str, port: int) -> list[Job]:
    """The job's parts, in the order of the hosts: equal numbers of consecutive ranks; rendezvous `address`:`port`."""
    assert job.ranks % hosts == 0, (job.ranks, hosts)
    share = job.ranks // hosts
    return [
        replace(job, part=Part(first_rank=number * share, ranks=share, address=address, port=port))
        for number in range(hosts)
    ]


def troubled(seen: Watched, ranks: int) -> bool:
    """Whether a host's part did not end well, so that the other parts wait for it in vain."""
    ended_well = sum(end.returncode == 0 for end in seen.exits)
    return ended_well < ranks or seen.timed_out_at is not None or bool(seen.server_lost)


def merged(seen: Mapping[str, Watched]) -> Watched:
    """The observations of a job's hosts, by name, as one. Cancelling the others after a failure is no cancelled job.

    The host whose deadline comes first ends its ranks, and the ranks of the others then fail because a peer is missing.
    """
    whole = Watched()
    for host, part in seen.items():
        whole.exits += part.exits
        if part.timed_out_at is not None:
            at = part.timed_out_at - CLOCKS_APART_SECONDS
            if whole.timed_out_at is None or at < whole.timed_out_at:
                whole.timed_out_at, whole.passed = at, part.passed
        whole.oom_killed |= part.oom_killed
        whole.left += part.left
        whole.places |= part.places
        whole.no_stacks = whole.no_stacks or part.no_stacks
        if part.server_lost and not whole.server_lost:
            whole.server_lost = f"{host}: {part.server_lost}"
        if part.progress:  # rank 0's host alone has some
            whole.progress = part.progress
    whole.exits.sort(key=lambda end: end.at)
    return whole


def lost_sentence(
    lost: Mapping[str, str],
    progress: Mapping[str, object],
    others: Sequence[str],
    again: str = "--resume --retry-failed",
) -> str:
    """Why a job ended whose hosts `lost` are gone, and the options `again` that repeat it; empty: without these."""
    gone = "; ".join(f"{host} was lost ({why})" for host, why in lost.items())
    ended = f", the ranks on {', '.join(others)} were ended" if others else ""
    return f"{gone}{after_step(progress)}{ended}" + (f"; {again} runs it on other hosts" if again else "")
