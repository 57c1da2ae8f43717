"""Facts about one node, as plain values. Choices are made from these alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LinkLayer = Literal["InfiniBand", "Ethernet", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The place of a device in the PCI tree."""

    # Root bus first, then every bridge and switch port, the device last: ("pci0000:16", "0000:16:01.0", "0000:17:00.0",
    # "0000:18:00.0"). Empty where the kernel does not show it.
    path: tuple[str, ...] = ()
    numa_node: int | None = None  # None: unknown, or a machine with a single node


@dataclass(frozen=True, kw_only=True, slots=True)
class Interface:
    """One network interface of the kernel."""

    name: str
    up: bool = True
    mtu: int | None = None  # bytes
    speed_mbps: int | None = None
    device: Device = field(default_factory=Device)  # empty for bonds, bridges and other virtual ones
    dev_port: int = 0  # which port of its device, from 0
    is_bond: bool = False
    lower: tuple[str, ...] = ()  # interfaces it is made of: a bond's members, a VLAN's parent
    addresses: tuple[str, ...] = ()  # IPv4


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One port of an RDMA adapter (HCA)."""

    hca: str
    number: int  # from 1
    state: str  # ACTIVE, DOWN, INIT, ...
    phys_state: str  # LinkUp, Disabled, Polling, ...
    rate_gbps: float | None
    link_layer: LinkLayer
    device: Device = field(default_factory=Device)

    @property
    def name(self) -> str:
        """As NCCL_IB_HCA names it: `mlx5_2:1`."""
        return f"{self.hca}:{self.number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One NVIDIA GPU."""

    address: str  # PCI address in the kernel's form, 0000:19:00.0
    device: Device = field(default_factory=Device)
    name: str = ""  # as nvidia-smi prints it; empty without a driver
    compute_capability: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The route from a node to an address."""

    target: str
    interface: str  # "" when there is no route
    source: str | None = None  # the node's own address on it, where known


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One line of a file from which NCCL reads variables."""

    file: str
    line: int  # from 1
    name: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """Everything read from one node."""

    node: str  # the name tables and warnings use
    cores: int | None = None
    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    head_route: Route | None = None  # None: no head address was given
    storage_routes: tuple[Route, ...] = ()
    driver: str | None = None  # NVIDIA driver
    nccl: str | None = None  # version of the NCCL wheel beside the node's torch
    nccl_conf: tuple[Setting, ...] = ()  # in NCCL's order: the user's file, then /etc/nccl.conf
    absent: tuple[str, ...] = ()  # files that variables of NCCL name and that cannot be read
    unread: tuple[str, ...] = ()  # a sentence for each probe that failed

    def interface(self, name: str) -> Interface | None:
        """The interface of that name, or None."""
        return next((interface for interface in self.interfaces if interface.name == name), None)
