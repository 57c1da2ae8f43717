"""Where Ray listens on the nodes of a site: firewalls want to know, and two users of one node want to differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RayPorts:
    """Ports and folders of `burst cluster up`. 0 lets the node choose a free port."""

    head_port: int = 6379
    client_port: int = 10001
    dashboard: bool = True  # on the head's loopback only
    dashboard_port: int = 8265
    node_manager_port: int = 0
    object_manager_port: int = 0
    worker_port_first: int = 20000
    worker_port_last: int = 20999
    temp_dir: str | None = None  # absolute path on the nodes; null: one of its own for each cluster, below /tmp
    object_store_gib: float = 1.0  # we pass messages through Ray, never tensors
    ready_seconds: float = 120.0  # until every node must have joined

    def __post_init__(self) -> None:
        for name in ("head_port", "client_port", "dashboard_port", "node_manager_port", "object_manager_port"):
            if not 0 <= getattr(self, name) < 65536:
                raise ValueError(f"ray.{name} is {getattr(self, name)}; expected 0 to 65535")
        if not 1024 <= self.worker_port_first <= self.worker_port_last < 65536:
            raise ValueError(
                f"ray's worker ports are {self.worker_port_first} to {self.worker_port_last}; "
                "expected a range within 1024 to 65535"
            )
        fixed = (
            self.head_port,
            self.client_port,
            self.dashboard_port,
            self.node_manager_port,
            self.object_manager_port,
        )
        for port in fixed:
            if port and (fixed.count(port) > 1 or self.worker_port_first <= port <= self.worker_port_last):
                raise ValueError(
                    f"ray would use port {port} twice; give each service, and the workers, ports of their own"
                )
        if self.temp_dir is not None and not self.temp_dir.startswith("/"):
            raise ValueError(f"ray.temp_dir is {self.temp_dir!r}; expected an absolute path on the nodes, or null")
        if self.object_store_gib < 0.1:
            raise ValueError(f"ray.object_store_gib is {self.object_store_gib:g}; expected at least 0.1")
        if self.ready_seconds <= 0:
            raise ValueError(f"ray.ready_seconds is {self.ready_seconds:g}; expected more than 0")
