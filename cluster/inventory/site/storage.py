"""Storage that the nodes of a site share."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPath:
    """One folder that every node must see, the same on all."""

    path: str
    write: bool = True  # false: a read-only mount is fine
    min_free_gib: float = 0.0
    probe_seconds: float = 10.0  # a hanging file server must cost this and not the whole check

    def __post_init__(self) -> None:
        if not self.path.startswith("/"):
            raise ValueError(f"storage.shared has the path {self.path!r}; expected an absolute path such as /data")
        if self.min_free_gib < 0:
            raise ValueError(f"min_free_gib of {self.path} is {self.min_free_gib:g}; expected 0 or more")
        if not 0 < self.probe_seconds <= 300:
            raise ValueError(
                f"probe_seconds of {self.path} is {self.probe_seconds:g}; expected above 0 and at most 300"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Shared folders, and the servers behind them."""

    shared: tuple[SharedPath, ...] = ()
    # IP addresses of file servers: adapters with the route to one of them carry storage and are left out of NCCL's.
    servers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for server in self.servers:
            try:
                ipaddress.ip_address(server)
            except ValueError:
                raise ValueError(f"storage.servers has {server!r}; expected an IP address such as 10.0.0.9") from None
