"""The supervisor actors of a run, one per host, and the calls to them, each with a deadline."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cluster.ray_cluster.ray_commands import node_resource
from harness.launch.nodes.actor import NodeActor

PLACEMENT_SECONDS = 60.0
CALL_SECONDS = 60.0  # a host that does not answer a short question for so long is lost
ENDING_SECONDS = 30.0
_CONCURRENCY = 6  # watch, and beside it progress, cancel, fetch, release, close


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
        self._group: Any = None
        self._members: dict[str, Member] = {}

    def gather(self, names: Sequence[str]) -> dict[str, str]:
        """Place a supervisor on each of these hosts; returns the reason by name where it could not."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        alive, free = self._resources(), self._ray.available_resources()
        missing = {
            name: "its Ray has left the cluster; burst cluster down, then up"
            if node_resource(name) not in alive
            else "another run uses it"
            for name in names
            if free.get(node_resource(name), 0) < 1
        }
        there = [name for name in names if name not in missing]
        if not there:
            return missing
        self._group = placement_group([{"CPU": 1, node_resource(name): 1} for name in there], strategy="STRICT_SPREAD")
        try:
            self._ray.get(self._group.ready(), timeout=PLACEMENT_SECONDS)
        except self._ray.exceptions.GetTimeoutError:
            self._remove_group()
            return missing | dict.fromkeys(there, f"Ray placed no supervisors within {PLACEMENT_SECONDS:g} s")
        for number, name in enumerate(there):
            actor = (
                self._ray.remote(NodeActor)
                .options(
                    num_cpus=1,
                    max_concurrency=_CONCURRENCY,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        self._group, placement_group_bundle_index=number
                    ),
                )
                .remote()
            )
            self._members[name] = Member(name=name, actor=actor, ray=self._ray)
        return missing

    def members(self, names: Sequence[str]) -> list[Member]:
        return [self._members[name] for name in names]

    def drop(self, name: str) -> None:
        """Forget a host that was lost; Ray ends its supervisor if that still runs."""
        if (member := self._members.pop(name, None)) is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._ray.kill(member.actor)

    def close(self) -> None:
        """End all ranks, then the supervisors. Idempotent."""
        endings = [(member, member.actor.close.remote()) for member in self._members.values()]
        for member, ending in endings:
            with contextlib.suppress(HostLost):
                member.result(ending, ENDING_SECONDS)
        for name in list(self._members):
            self.drop(name)
        self._remove_group()

    def _remove_group(self) -> None:
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(self._ray.exceptions.RayError):
                remove_placement_group(self._group)
            self._group = None

    def _resources(self) -> set[str]:
        """Names of all resources of the nodes that are alive."""
        return {name for node in self._ray.nodes() if node["Alive"] for name in node["Resources"]}


def one_line(text: str) -> str:
    """The first line of Ray's message about a loss."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0].rstrip(".")[:200] if lines else "Ray gave no reason"
