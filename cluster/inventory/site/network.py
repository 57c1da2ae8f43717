"""The network between the nodes of a site. What is null is found out on each node, or not judged."""

from __future__ import annotations

import re
from dataclasses import dataclass

_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14}")  # the kernel allows 15 characters
_HCA = re.compile(r"[A-Za-z0-9_]+(:\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkExpectation:
    """Interfaces and adapters that carry a trial's traffic, and the rates they must have."""

    interface: str | None = None  # for NCCL's and gloo's sockets; null: the one with the route to the head node
    hcas: tuple[str, ...] | None = None  # exact names, mlx5_2 or mlx5_2:1; null: chosen by discovery; []: none
    mtu: int | None = None  # bytes, of `interface`
    port_rate_gbps: float | None = None  # least rate of each port in `hcas`; null: what the GPU's profile expects
    gid_index: int | None = None  # NCCL_IB_GID_INDEX; null leaves the choice to NCCL

    def __post_init__(self) -> None:
        if self.interface is not None and not _INTERFACE.fullmatch(self.interface):
            raise ValueError(f"network.interface is {self.interface!r}; expected one interface's name such as eth0")
        for hca in self.hcas or ():
            if not _HCA.fullmatch(hca):
                raise ValueError(
                    f"network.hcas has {hca!r}; expected names such as mlx5_2 or mlx5_2:1, without '=' or '^'"
                )
        if self.mtu is not None and not 576 <= self.mtu <= 65536:
            raise ValueError(f"network.mtu is {self.mtu}; expected 576 to 65536 bytes")
        if self.port_rate_gbps is not None and self.port_rate_gbps <= 0:
            raise ValueError(f"network.port_rate_gbps is {self.port_rate_gbps:g}; expected more than 0, or null")
        if self.gid_index is not None and not 0 <= self.gid_index <= 255:
            raise ValueError(f"network.gid_index is {self.gid_index}; expected 0 to 255, or null to leave it to NCCL")
