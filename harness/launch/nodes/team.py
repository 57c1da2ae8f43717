"""The supervisor actors of a run, one per host, and the calls to them, each with a deadline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cluster.files.errors import without_color
from cluster.ray_cluster.commands import node_resource
from harness.base.interrupts import look
from harness.launch.nodes.actor import NodeActor

PLACEMENT_SECONDS = 60.0
CALL_SECONDS = 60.0  # a host that does not answer a short question for so long is lost
ENDING_SECONDS = 30.0
_CONCURRENCY = 7  # watch, and beside it progress, cancel, fetch, files, release, close


class HostLost(Exception):
    """A host whose supervisor is gone or silent."""

    def __init__(self, host: str, why: str) -> None:
        super().__init__(f"{host}: {why}")
        self.host = host
        self.why = why


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One host's supervisor."""

    name: str
    actor: Any
    ray: ModuleType

    def call(self, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """The result of one short call. Raises HostLost."""
        return self.result(getattr(self.actor, method).remote(*arguments), seconds)

    def result(self, reference: Any, seconds: float | None = None) -> Any:
        """The result of a call made before. Raises HostLost when the host is gone, or silent for `seconds`."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(reference, timeout=seconds)
        except errors.GetTimeoutError:
            raise HostLost(self.name, f"no answer within {seconds:g} s") from None
        except errors.RayTaskError as error:
            if isinstance(error.cause, OSError):  # its file system failed, others may work
                why = f"{error.cause.filename or 'a file'}: {error.cause.strerror}"
                raise HostLost(self.name, why) from None
            raise  # a fault of this program on the other side, not of the host
        except errors.RayError as error:
            raise HostLost(self.name, one_line(str(error))) from error


class Team:
    """All supervisors of a run. Hosts are reserved until `close`: another run takes other hosts."""

    def __init__(self, ray: ModuleType) -> None:
        self._ray = ray
        self._groups: dict[str, Any] = {}
        self._members: dict[str, Member] = {}

    def gather(self, addresses: Mapping[str, str]) -> dict[str, str]:
        """Place a supervisor on each of these hosts, by name; returns the reason by name where it could not.

        Each is in a placement group of its own, which only that host can hold: a host that does not answer delays the
        others until Ray gives it up or PLACEMENT_SECONDS have passed, and costs them nothing else.
        """
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        free = self._ray.available_resources()
        missing = self._absent(addresses)
        for name in addresses:
            if name not in missing and free.get(node_resource(name), 0) < 1:
                missing[name] = "another run uses it"
        waiting: dict[Any, str] = {}
        for name in addresses:
            if name not in missing:
                group = placement_group([{"CPU": 1, node_resource(name): 1}], strategy="STRICT_SPREAD")
                strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
                actor = self._ray.remote(NodeActor).options(
                    num_cpus=1, max_concurrency=_CONCURRENCY, scheduling_strategy=strategy
                ).remote()  # fmt: skip
                self._groups[name] = group
                self._members[name] = Member(name=name, actor=actor, ray=self._ray)
                waiting[actor.__ray_ready__.remote()] = name
        for name, why in self._silent(waiting, addresses).items():
            missing[name] = why
            self.drop(name)
        return missing

    def _absent(self, addresses: Mapping[str, str]) -> dict[str, str]:
        """Hosts whose Ray is not in the cluster, and why."""
        nodes = self._ray.nodes()
        alive = {name for node in nodes if node["Alive"] for name in node["Resources"]}
        known = {node["NodeManagerAddress"] for node in nodes}
        return {
            name: "its Ray has left the cluster; burst cluster up adds it again"
            if address in known
            else "its Ray never joined the cluster; burst cluster up adds it again"
            for name, address in addresses.items()
            if node_resource(name) not in alive
        }

    def _silent(self, waiting: dict[Any, str], addresses: Mapping[str, str]) -> dict[str, str]:
        """Wait for these supervisors; returns the hosts on which none has started, and why."""
        ends_at = time.monotonic() + PLACEMENT_SECONDS
        failed: dict[str, str] = {}
        while waiting and time.monotonic() < ends_at:
            look()
            for reference in self._ray.wait(list(waiting), num_returns=len(waiting), timeout=1.0)[0]:
                name = waiting.pop(reference)
                with contextlib.suppress(HostLost):
                    self._members[name].result(reference)
                    continue
                failed[name] = "its supervisor ended as it started; see burst cluster status"
            absent = self._absent({name: addresses[name] for name in waiting.values()})
            waiting = {reference: name for reference, name in waiting.items() if name not in absent}
            failed |= absent
        return failed | dict.fromkeys(waiting.values(), f"Ray placed no supervisor within {PLACEMENT_SECONDS:g} s")

    def members(self, names: Sequence[str]) -> list[Member]:
        return [self._members[name] for name in names]

    def drop(self, name: str) -> None:
        """Forget a host that was lost; Ray ends its supervisor if that still runs."""
        if (member := self._members.pop(name, None)) is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(member.actor)
        self._remove_group(name)

    def close(self) -> None:
        """End all ranks, then the supervisors. Idempotent."""
        endings = [(member, member.actor.close.remote()) for member in self._members.values()]
        ends_at = time.monotonic() + ENDING_SECONDS
        for member, ending in endings:
            with contextlib.suppress(HostLost):
                member.result(ending, max(0.1, ends_at - time.monotonic()))
        for name in list(self._groups):
            self.drop(name)

    def _remove_group(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(self._ray.exceptions.RayError):
                remove_placement_group(group)


def one_line(text: str) -> str:
    """The first line of Ray's message about a loss, without its colours."""
    lines = [line.strip() for line in without_color(text).splitlines() if line.strip()]
    return lines[0].rstrip(".")[:200] if lines else "Ray gave no reason"
