"""Ports of a rendezvous: outside the kernel's own range, reserved against other processes, and usable by rank 0."""

import datetime
import socket
import subprocess
import sys

import pytest
from torch.distributed import TCPStore

from harness.launch.ports import EPHEMERAL_RANGE, port_was_taken, reserve_port, usable_ports
from tests.patience import AMPLE


def test_the_port_lies_where_the_kernel_hands_out_none():
    first, last = map(int, EPHEMERAL_RANGE.read_text().split())
    with reserve_port() as port:
        assert not first <= port <= last


def test_reserved_and_ephemeral_ports_are_left_out():
    ports = usable_ports("30000 65000", "20000,20010-20020\n")
    assert ports[0] == 20001
    assert not set(range(20010, 20021)) & set(ports)
    assert not set(range(30000, 65001)) & set(ports)
    assert ports[-1] == 65535


def test_a_kernel_range_that_leaves_nothing_is_shared():
    assert usable_ports("1024 65535", "") == list(range(20000, 65536))


def test_rank_0_can_listen_on_the_reserved_port():
    with reserve_port() as port:
        store = TCPStore("127.0.0.1", port, 1, is_master=True, timeout=datetime.timedelta(seconds=AMPLE))
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_two_trials_never_share_a_port():
    with reserve_port() as port, reserve_port([port, other_than(port)]) as second:
        assert second != port


def test_another_process_that_reserves_is_given_another_port():
    script = "import sys; from harness.launch.ports import reserve_port\nwith reserve_port([int(sys.argv[1])]): pass"
    with reserve_port() as port:
        other = subprocess.run([sys.executable, "-c", script, str(port)], capture_output=True, text=True, timeout=AMPLE)
    assert other.returncode == 1
    assert "all 1 ports for a trial's rendezvous are in use; end the processes that hold them" in other.stderr


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_a_port_somebody_has_on_one_address_is_not_given_out(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with reserve_port() as port:
        pass
    with socket.socket(family) as taken:
        try:
            taken.bind((address, port))
        except OSError as error:
            pytest.skip(f"this machine has no {address} ({error})")
        with pytest.raises(OSError, match="all 1 ports"), reserve_port([port]):
            pass


@pytest.mark.parametrize(
    "reason",
    [
        "rank 0: DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, "
        "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "rank 1: RuntimeError: [enforce fail at tcp/device.cc] bind: Address already in use",
    ],
)
def test_losing_a_port_is_recognised_in_the_words_of_each_library(reason):
    assert port_was_taken(reason)
    assert not port_was_taken("rank 0: RuntimeError: Connection reset by peer")


def other_than(port: int) -> int:
    """A free port that is not `port`."""
    with reserve_port([candidate for candidate in usable_ports() if candidate != port]) as other:
        return other
