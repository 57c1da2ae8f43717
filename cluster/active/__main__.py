"""The worker of active tests, as it runs on a node.

`speeds` measures the node by itself. `pair` is one end of an exchange with another node: node 0 opens a store and
prints where, node 1 gets that as an argument. Every answer is a marked line of JSON (`measurement`).
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

from cluster.active import rails
from cluster.active.measurement import SIZES, Device, NodeSpeeds, line, speeds_line
from cluster.active.rails import parse_rails

_SIOCGIFADDR = 0x8915  # netdevice(7)
_LISTEN_SECONDS = 2.0  # until the listeners have registered their memory; they do not say when
_ANY_PORT = 9  # nothing is sent: connecting a datagram socket only chooses a route


def source_towards(address: str) -> str:
    """This node's own IPv4 address on the route to `address`. Raises OSError where no route leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _ANY_PORT))
        return str(probe.getsockname()[0])


def interface_towards(address: str) -> str | None:
    """Name of the interface towards `address`, such as eth0.

    None when no interface has the source address: IPv6, or several addresses on one interface.
    """
    try:
        source = source_towards(address)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # no IPv4 address on this one
            if socket.inet_ntoa(answer[20:24]) == source:
                return name
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """0 when the answer was measured, 1 when it is the reason why not."""
    parser = argparse.ArgumentParser(prog="python -m cluster.active", description=__doc__)
    parser.add_argument("test", choices=["speeds", "pair", "rails"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=300.0, help="until a collective must have ended")
    parser.add_argument("--node", type=int, choices=[0, 1], help="which end of the pair this is")
    parser.add_argument("--peer", help="address of the other node")
    parser.add_argument("--store", default="", help="address:port of node 0's store")
    parser.add_argument("--rails", type=parse_rails, help="ports with their GPUs: mlx5_0:1=0,mlx5_1:1=1")
    parser.add_argument("--ports", help="of node 0's listeners, one for each rail")
    parser.add_argument("--attended", action="store_true", help="end when standard input ends")
    arguments = parser.parse_args(argv)
    if arguments.attended:
        threading.Thread(target=_end_with_input, daemon=True).start()
    reason = rails.unavailable() if arguments.test == "rails" else _unavailable(arguments.device)
    if reason:
        print(line("unavailable", {"reason": reason}), flush=True)
        return 1
    try:
        if arguments.test == "speeds":
            print(speeds_line(_speeds(arguments.device, arguments.seconds)), flush=True)
        elif arguments.test == "rails":
            _rails(arguments.node, arguments.rails, arguments.peer, arguments.ports)
        else:
            speed = _exchange(arguments.device, arguments.node, arguments.peer, arguments.store, arguments.seconds)
            print(line("pair", {"gb_per_second": speed}), flush=True)
    except (RuntimeError, OSError, ValueError) as error:
        words = " ".join(str(error).split())[:300] or type(error).__name__
        print(line("failure", {"reason": words}), flush=True)
        return 1
    return 0


def _end_with_input() -> None:
    """End this process and its ranks when the program that started it has ended; each command has its own group."""
    while os.read(0, 4096):  # not sys.stdin, whose lock a thread that waits would hold when the program ends
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _unavailable(device: Device) -> str:
    """The reason why nothing can be measured here; empty when something can."""
    try:
        import torch
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed in {sys.executable} of the node; set software.python in the site"
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no GPU on the node"
    return ""


def _speeds(kind: Device, seconds: float) -> NodeSpeeds:
    import torch

    from cluster.active import measure

    sizes = SIZES[kind]
    found = measure.devices(kind)
    host = [measure.host_gb_per_second(device, sizes) for device in found]
    gemm = [measure.gemm_tflops(device, sizes) for device in found]
    hbm = [measure.hbm_gb_per_second(device, sizes) for device in found]
    peers = measure.peer_gb_per_second(found, sizes)
    if kind == "cuda":
        torch.cuda.empty_cache()  # the ranks of the all-reduce are processes of their own
    return NodeSpeeds(
        gpu=torch.cuda.get_device_name(0) if kind == "cuda" else "cpu",
        gemm_tflops=gemm,
        hbm_gb_per_second=hbm,
        to_device_gb_per_second=[to_device for to_device, _ in host],
        from_device_gb_per_second=[from_device for _, from_device in host],
        peer_gb_per_second=peers,
        all_reduce_gb_per_second=measure.all_reduce_gb_per_second(kind, seconds),
    )


def _exchange(kind: Device, node: int, peer: str, store: str, seconds: float) -> float:
    import torch.distributed as dist

    from cluster.active import measure

    # By default, both libraries may choose a bridge or loopback.
    towards = socket.gethostbyname(peer)
    name = interface_towards(towards)
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")
    if node == 1:
        place, _, port = store.rpartition(":")
        return measure.exchange_gb_per_second(kind, place, int(port), 1, seconds)
    # A socket of ours, because torch's own listens on all interfaces.
    with socket.create_server((source_towards(towards), 0)) as listening:
        own, number = listening.getsockname()
        served = dist.TCPStore(
            own, number, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds),
            master_listen_fd=listening.detach(),
        )  # fmt: skip
    print(line("port", {"port": f"{own}:{served.port}"}), flush=True)
    return measure.exchange_gb_per_second(kind, own, served.port, 0, seconds)


def _rails(node: int, ours: Sequence[rails.Rail], peer: str, ports: str | None) -> None:
    """Node 0 listens until node 1 has called every rail, or until it is ended; node 1 calls one rail after another."""
    gpus = rails.takes_gpus()
    if node == 1:
        assert ports is not None
        numbers = [int(port) for port in ports.split(",")]
        speeds = [rails.measure(rail, port, peer, gpus) for rail, port in zip(ours, numbers, strict=True)]
        print(line("rails", {"speeds": speeds}), flush=True)
        return
    free = rails.free_ports(len(ours))
    listeners = rails.listen(ours, free, gpus)
    time.sleep(_LISTEN_SECONDS)
    print(line("port", {"port": ",".join(map(str, free))}), flush=True)
    for listener in listeners:
        listener.wait()


if __name__ == "__main__":
    sys.exit(main())
