"""One job on reserved hosts: directories for hosts that do not see the launcher's, each host's environment, the ranks'
files fetched, and one outcome of what all hosts have seen.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.measurement import write_json
from harness.launch.launcher import Job
from harness.launch.ray.host import Description, receive_files
from harness.launch.ray.watch import HostFolder, HostLost, Hosts, JobWatch, Member, lost_sentence, merged, split
from harness.launch.verdict import after_step, judge
from harness.machine.this_machine import Machine
from harness.records.provenance import portable_command, redact
from harness.records.record import Status

ENVIRONMENTS = "environment"  # folder in a trial's directory: one file per host, secrets redacted
FRESH_SECONDS = 30.0  # a host found fit so recently is not looked at again
_PROBE_FILE = ".shared"


@dataclass(kw_only=True, slots=True)
class ReservedHost:
    """A host of the cluster that this run has reserved."""

    name: str
    address: str
    ranks: int  # of one trial
    machine: Machine
    described: Description
    member: Member
    node_id: str = ""  # Ray's; another one after the host came back
    group: Any = None  # Ray's placement group that reserves it
    fit_at: float = field(default=float("-inf"))  # seconds of the clock of `unfit`

    def unfit(self, now: float) -> str:
        """Why the host cannot be used now; empty when it can, or could a moment ago. Raises HostLost."""
        if now - self.fit_at < FRESH_SECONDS:
            return ""
        why = str(self.member.call("unfit"))
        if not why:
            self.fit_at = now
        return why


class HostsJob:
    """One job on its hosts."""

    def __init__(
        self,
        job: Job,
        hosts: Sequence[ReservedHost],
        connection: Hosts,
        user: Mapping[str, str],
        on_progress: Callable[[dict[str, object]], None] | None,
    ) -> None:
        self._job = job
        self._hosts = hosts
        self._connection = connection
        self._user = user
        self._on_progress = on_progress
        self.lost: dict[str, str] = {}  # hosts that were lost, and why
        self.head_lost = False
        self.begun = False  # ranks may have been started
        self._apart: dict[str, str] = {}  # trial directory on hosts that do not share this one's storage
        self._folders: list[HostFolder] = []  # of the job's exchange, on those hosts

    def execute(self) -> tuple[Status, str]:
        """Run the job to its end; returns status and reason. Raises HostLost when a host was lost before it began."""
        self._stage()
        first = self._hosts[0].member
        port = int(first.call("reserve"))
        try:
            parts = split(self._job, hosts=len(self._hosts), address=self._hosts[0].address, port=port)
            placed = [self._placed(part, host) for part, host in zip(parts, self._hosts, strict=True)]
            members = [host.member for host in self._hosts]
            watch = JobWatch(list(zip(members, placed, strict=True)), self._connection, self._progressed)
            self.begun = True
            try:
                watch.run()
            finally:  # also at Ctrl-C, which goes on when the ranks have ended
                self.lost, self.head_lost = dict(watch.lost), watch.head_lost
                if not watch.head_lost:
                    self._fetch()
        finally:
            if not self.lost and not self.head_lost:  # the port goes with the host, or at the next job
                with contextlib.suppress(HostLost):
                    first.call("release")
        if watch.head_lost:
            return "node_lost", f"{after_step(watch.last_progress)}, and the ranks were ended"
        if self.lost:
            others = [member.name for member in members if member.name not in self.lost]
            return "node_lost", lost_sentence(self.lost, watch.last_progress, others, self._job.again)
        return judge(self._job, merged(watch.seen))

    def _stage(self) -> None:
        """Give hosts that do not see the trial's directory one of their own."""
        trial_dir, exchange = self._job.trial_dir, self._job.exchange
        (trial_dir / "logs").mkdir(parents=True, exist_ok=True)
        probe = trial_dir / _PROBE_FILE
        content = secrets.token_hex(8)
        probe.write_text(content, encoding="utf-8")
        root = "" if exchange is None else str(exchange.root)
        try:
            apart = [host for host in self._hosts if not host.member.call("sees", str(probe.absolute()), content, root)]
        finally:
            probe.unlink()
        own = [(host.member, host.described.root or f"{host.described.folder}/{self._job.trial_id}") for host in apart]
        if exchange is not None and apart:
            first = self._hosts[0].member
            self._folders = [HostFolder(member, path, first=member is first) for member, path in own]
            exchange.begin(self._folders, all_apart=len(apart) == len(self._hosts))
            own = [(member, f"{path}/{trial_dir.relative_to(exchange.root)}") for member, path in own]
        files = {path.name: path.read_bytes() for path in trial_dir.glob("*.json")}
        for member, path in own:
            member.call("stage", path, files)
            self._apart[member.name] = path

    def _progressed(self, line: dict[str, object]) -> None:
        if self._job.exchange is not None and self._folders:
            self._job.exchange.progressed(line, self._folders)
        if self._on_progress is not None:
            self._on_progress(line)

    def _placed(self, part: Job, host: ReservedHost) -> Job:
        """The part as this host runs it: its paths, its interpreter, its environment."""
        here = str(part.trial_dir)
        there = self._apart.get(host.name, here)
        names = {sys.executable: host.described.python, here: there}
        environment = host.member.call(
            "environment", replace(part, exchange=None), self._user, self._connection.head[0],
            alone=len(self._hosts) == 1,
        )  # fmt: skip
        write_json(
            self._job.trial_dir / ENVIRONMENTS / f"{host.name}.json",
            {
                "host": host.name,
                "address": host.address,
                "ranks": list(part.own_ranks),
                "command": portable_command(part.command, part.trial_dir),
                "environment": redact(environment),
            },
        )
        return replace(
            part,
            exchange=None,
            trial_dir=Path(there),
            command=[names.get(word, word) for word in part.command],
            environment=environment,
        )

    def _fetch(self) -> None:
        """Fetch the ranks' files from hosts with a directory of their own, which is removed once they are here. A host
        that does not give them is lost: how its ranks ended is in them."""
        for host in self._hosts:
            if host.name in self._apart and host.name not in self.lost:
                try:
                    receive_files(self._job.trial_dir, host.member.call("fetch", self._apart[host.name]))
                except HostLost as error:
                    self.lost[host.name] = error.why
                    continue
                with contextlib.suppress(HostLost):  # nothing of the job needs it any more
                    host.member.call("remove", self._apart[host.name])
        left = [folder for folder in self._folders if folder.host not in self.lost]
        if self._job.exchange is not None and self._folders:
            self._job.exchange.end(left)
