"""Many nodes at once over SSH: one connection each, all of them answered for."""

import socket
from concurrent.futures import ThreadPoolExecutor

from cluster.inventory.hosts import Host
from cluster.transport.fleet import on_each
from cluster.transport.runner import Unreachable
from cluster.transport.ssh import SshOptions, connector
from tests.patience import AMPLE


def test_sixty_four_connections_to_one_server_each_run_a_command(sshd):
    user = sshd.target().partition("@")[0]
    hosts = [
        Host(name=f"n{number}", address=f"127.0.0.{1 + number % 2}", user=user, port=sshd.port, key=sshd.key)
        for number in range(64)
    ]
    connect, before = connector(SshOptions(known_hosts=sshd.known_hosts)), sshd.logins()

    def work(host):
        with connect(host, AMPLE) as runner:
            return runner.run(["echo", host.name], deadline_seconds=AMPLE).stdout

    assert dict(on_each(hosts, work, AMPLE)) == {host: f"{host.name}\n" for host in hosts}
    assert sshd.logins() == before + 64


def test_a_host_that_never_speaks_does_not_take_the_turn_of_one_that_does(sshd, monkeypatch):
    monkeypatch.setattr("cluster.transport.ssh.opening.LOGINS_AT_ONCE", 1)
    monkeypatch.setattr("cluster.transport.ssh.opening.TURN_SECONDS", 5.0)  # the mute host is given ten
    user = sshd.target().partition("@")[0]
    connect = connector(SshOptions(known_hosts=sshd.known_hosts))
    good = Host(name="good", address="127.0.0.1", user=user, port=sshd.port, key=sshd.key)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(AMPLE)
        mute = Host(name="mute", address="127.0.0.1", user=user, port=server.getsockname()[1], key=sshd.key)

        def work(host):
            with connect(host, AMPLE) as runner:
                return runner.run(["echo", host.name], deadline_seconds=AMPLE).stdout

        with ThreadPoolExecutor(1) as pool:
            silent = pool.submit(work, mute)
            accepted, _ = server.accept()
            assert work(good) == "good\n"
            accepted.close()
            assert isinstance(silent.exception(AMPLE), Unreachable)
