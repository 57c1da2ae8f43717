"""A node as its kernel shows it: /sys and /proc in a folder of ours, with an `ip` and an nvidia-smi that answer for it.

Written after the kernel's documentation of sysfs (Documentation/ABI: sysfs-class-infiniband, sysfs-class-net,
sysfs-bus-pci) and the layout of the machines named in the tests; not captured from them.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
from pathlib import Path

import pytest

from cluster.discovery.facts import NodeFacts
from cluster.discovery.read import read_node
from cluster.inventory.site import Site, Software
from cluster.transport.reach import LocalRunner
from tests.patience import AMPLE
from tests.programs import shell_program

INFINIBAND = {"link_layer": "InfiniBand", "rate": "400 Gb/sec (4X NDR)"}
ETHERNET = {"link_layer": "Ethernet", "rate": "100 Gb/sec (4X EDR)"}


class FakeNode:
    """Devices are added one by one; `facts` reads them all with discovery's own script."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = folder / "root with space"
        self._bin = folder / "bin"
        self._bin.mkdir()
        self._gpus: list[str] = []
        self._addresses: dict[str, str] = {}
        self._routes: dict[str, str] = {}  # target -> interface, as `ip route get` prints it
        for name in ("sys/class/net", "sys/class/infiniband", "sys/bus/pci/devices", "proc/net"):
            (self._root / name).mkdir(parents=True)
        self._write("proc/mounts", "/dev/sda1 / ext4 rw 0 0\n")
        self._write("proc/net/route", "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n")
        self.program("ip", "exit 1")
        self.program("nvidia-smi", "exit 6")
        self.program("python", "echo 2.27.7")
        monkeypatch.setenv("PATH", f"{self._bin}:{os.environ['PATH']}")

    def program(self, name: str, body: str) -> None:
        shell_program(self._bin / name, body)

    def device(self, path: str, numa: int = 0) -> Path:
        """A PCI device at `path`, written as root bus/bridge/.../device."""
        folder = self._root / "sys/devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(f"{numa}\n")
        link = self._root / "sys/bus/pci/devices" / folder.name
        if not link.is_symlink():
            link.symlink_to(folder)
        return folder

    def gpu(self, path: str, numa: int = 0, name: str = "NVIDIA H100 80GB HBM3", capability: str = "9.0") -> None:
        folder = self.device(path, numa)
        (folder / "vendor").write_text("0x10de\n")
        (folder / "class").write_text("0x030200\n")
        self._gpus.append(f"0000{folder.name.upper()}, {name}, {capability}, 580.95.05")
        self.program("nvidia-smi", "\n".join(f"echo {shlex.quote(line)}" for line in self._gpus))

    def hca(self, name: str, path: str, numa: int = 0, ports: int = 1, **facts: str) -> None:
        """An adapter; `facts` are its ports' files, by default those of an active InfiniBand port."""
        folder = self._root / "sys/class/infiniband" / name
        folder.mkdir()
        (folder / "device").symlink_to(self.device(path, numa))
        for number in range(1, ports + 1):
            for key, value in {"state": "4: ACTIVE", "phys_state": "5: LinkUp", **INFINIBAND, **facts}.items():
                self._write(f"sys/class/infiniband/{name}/ports/{number}/{key}", value + "\n")

    def interface(
        self,
        name: str,
        path: str = "",
        *,
        address: str = "",
        lower: tuple[str, ...] = (),
        bond: bool = False,
        **facts: str,
    ) -> None:
        for key, value in {"operstate": "up", "mtu": "1500", "speed": "100000", "dev_port": "0", **facts}.items():
            self._write(f"sys/class/net/{name}/{key}", value + "\n")
        folder = self._root / "sys/class/net" / name
        if path:
            (folder / "device").symlink_to(self.device(path))
        if bond:
            (folder / "bonding").mkdir()
        for below in lower:
            (folder / f"lower_{below}").symlink_to(self._root / "sys/class/net" / below)
        self._addresses[name] = address
        self._answer()

    def route(self, target: str, interface: str) -> None:
        """`ip route get TARGET` prints INTERFACE; without this, there is no route to it."""
        self._routes[target] = interface
        self._answer()

    def table_row(self, interface: str, network: str, mask: str, metric: int = 0) -> None:
        """A row of /proc/net/route; used once `ip` is taken away."""
        with open(self._root / "proc/net/route", "a") as file:
            file.write(f"{interface}\t{_hex(network)}\t00000000\t0001\t0\t0\t{metric}\t{_hex(mask)}\t0\t0\t0\n")

    def mount(self, line: str) -> None:
        with open(self._root / "proc/mounts", "a") as file:
            file.write(line + "\n")

    def file(self, path: str, text: str) -> None:
        """A file of the node, at this absolute path."""
        self._write(path.lstrip("/"), text)

    def without_ip(self) -> None:
        """As on a node where iproute2 is missing."""
        self.program("ip", "exit 127")

    def facts(self, site: Site | None = None, head: str | None = "10.0.0.1", node: str = "gpu01") -> NodeFacts:
        site = site or Site(software=Software(python=str(self._bin / "python")))
        return read_node(node, LocalRunner(), site, head=head, deadline_seconds=AMPLE, root=str(self._root))

    def _answer(self) -> None:
        listed = [
            {"ifname": name, "mtu": int((self._root / "sys/class/net" / name / "mtu").read_text()),
             "operstate": (self._root / "sys/class/net" / name / "operstate").read_text().strip().upper(),
             "addr_info": [{"family": "inet", "local": address}] if address else []}
            for name, address in self._addresses.items()
        ]  # fmt: skip
        cases = []
        for target, interface in self._routes.items():
            source = self._addresses.get(interface) or None
            own = target == source
            answer = [{"dst": target, "dev": "lo" if own else interface, "prefsrc": source}]
            cases.append(f'*" get {target}") echo {shlex.quote(json.dumps(answer))} ;;')
        body = (
            f'case "$*" in *addr) echo {shlex.quote(json.dumps(listed))} ;;\n'
            + "\n".join(cases)
            + "\n*) exit 2 ;; esac"
        )
        self.program("ip", body)

    def _write(self, name: str, text: str) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _hex(address: str) -> str:
    return socket.inet_aton(address)[::-1].hex().upper()


def h100(node: FakeNode) -> None:
    """8 x H100, each below a PCIe switch with a 400 Gb/s adapter; two more adapters of the same rate for storage, whose
    names come between; a bonded Ethernet adapter for everything else."""
    names = ("mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11")
    for number, name in enumerate(names):
        switch = f"pci0000:{0x10 + number:02x}/0000:{0x10 + number:02x}:01.0/0000:{0x20 + number:02x}:00.0"
        node.gpu(f"{switch}/0000:{0x20 + number:02x}:01.0/0000:{0x40 + number:02x}:00.0", numa=number // 4)
        node.hca(name, f"{switch}/0000:{0x20 + number:02x}:02.0/0000:{0x50 + number:02x}:00.0", numa=number // 4)
        node.interface(
            f"ib{number}", f"{switch}/0000:{0x20 + number:02x}:02.0/0000:{0x50 + number:02x}:00.0", mtu="4092"
        )
    for number, name in enumerate(("mlx5_1", "mlx5_7")):
        path = f"pci0000:{0x80 + number:02x}/0000:{0x80 + number:02x}:01.0/0000:{0x90 + number:02x}:00.0"
        node.hca(name, path, numa=number)
        node.interface(f"ibs{number}", path, address=f"10.8.0.{number + 1}", mtu="4092")
    bonded = "pci0000:a0/0000:a0:01.0/0000:b0:00"
    node.hca("mlx5_bond_0", f"{bonded}.0", **ETHERNET)
    node.interface("eth0", f"{bonded}.0")
    node.interface("eth1", f"{bonded}.1")
    node.interface("bond0", address="10.0.0.11", lower=("eth0", "eth1"), bond=True)
    node.route("10.0.0.1", "bond0")
    node.route("10.8.0.100", "ibs0")
    node.mount("10.8.0.100@o2ib:/scratch /scratch lustre rw,flock 0 0")


def a800(node: FakeNode) -> None:
    """8 x A800, two to a PCIe switch, with four 200 Gb/s adapters named as in the published artifact."""
    for number, name in enumerate(("mlx5_2", "mlx5_3", "mlx5_5", "mlx5_6")):
        switch = f"pci0000:{0x10 + number:02x}/0000:{0x10 + number:02x}:01.0/0000:{0x20 + number:02x}:00.0"
        for slot in (0, 1):
            path = f"{switch}/0000:{0x20 + number:02x}:0{slot}.0/0000:{0x40 + 2 * number + slot:02x}:00.0"
            node.gpu(path, name="NVIDIA A800-SXM4-80GB", capability="8.0")
        node.hca(
            name, f"{switch}/0000:{0x20 + number:02x}:02.0/0000:{0x50 + number:02x}:00.0", rate="200 Gb/sec (4X HDR)"
        )
    for name, bus in (("mlx5_0", "80"), ("mlx5_1", "81"), ("mlx5_4", "82")):
        node.hca(name, f"pci0000:{bus}/0000:{bus}:01.0/0000:9{bus[1]}:00.0", rate="100 Gb/sec (2X HDR)")
    node.interface("ens1", "pci0000:84/0000:84:01.0/0000:94:00.0", address="10.0.0.1")
    node.route("10.0.0.1", "ens1")


def roce(node: FakeNode) -> None:
    """Two GPUs with an Ethernet adapter each, and a slower one for the machine itself; no InfiniBand anywhere."""
    for number in (0, 1):
        switch = f"pci0000:{0x10 + number}/0000:{0x10 + number}:01.0/0000:{0x20 + number}:00.0"
        node.gpu(f"{switch}/0000:{0x20 + number}:01.0/0000:{0x40 + number}:00.0")
        adapter = f"{switch}/0000:{0x20 + number}:02.0/0000:{0x50 + number}:00.0"
        node.hca(f"rocep{number}s0", adapter, link_layer="Ethernet", rate="400 Gb/sec (4X NDR)")
        node.interface(f"enp{number}s0", adapter, address=f"10.9.{number}.2", mtu="9000")
    node.hca("mlx5_0", "pci0000:60/0000:60:01.0/0000:61:00.0", **ETHERNET)
    node.interface("eno1", "pci0000:60/0000:60:01.0/0000:61:00.0", address="10.0.0.2")
    node.route("10.0.0.1", "eno1")
