"""Many connections at once, and connections through a jump host: real servers, one reached through the other."""

import contextlib
import dataclasses
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.inventory.hosts import Host, parse_hosts
from cluster.transport import ssh
from cluster.transport.fleet import on_each
from cluster.transport.runner import Unreachable
from cluster.transport.ssh import SshOptions, Tunnel, connector
from cluster.transport.transfer import put
from tests.cluster.loopback_sshd import free_port, make_key, running_sshd
from tests.patience import AMPLE


@pytest.fixture(scope="module")
def jump(tmp_path_factory, sshd):
    """A server that lets its users go on to the node's server, and nowhere else."""
    options = f"PermitOpen 127.0.0.1:{sshd.port}\n"
    with running_sshd(tmp_path_factory.mktemp("jump"), addresses=["127.0.0.1"], options=options) as server:
        yield server


@pytest.fixture
def known_hosts(tmp_path, sshd, jump):
    path = tmp_path / "known_hosts"
    path.write_text(sshd.known_hosts.read_text() + jump.known_hosts.read_text())
    return path


def behind(jump, sshd, address="127.0.0.1", port=None):
    user = sshd.target().partition("@")[0]
    bastion = Host(name="bastion", address="127.0.0.1", user=user, port=jump.port, key=jump.key)
    return Host(name="node", address=address, user=user, port=port or sshd.port, key=sshd.key, jump=bastion)


def test_a_command_runs_behind_the_jump_host(sshd, jump, known_hosts):
    before = jump.logins()
    with connector(SshOptions(known_hosts=known_hosts))(behind(jump, sshd), AMPLE) as runner:
        done = runner.run(["sh", "-c", "echo $SSH_CONNECTION; cat"], stdin="given", deadline_seconds=AMPLE)
    assert done.stdout.split()[3] == str(sshd.port)
    assert done.stdout.endswith("given")
    assert jump.logins() == before + 1


def test_many_nodes_share_one_connection_to_the_jump_host(sshd, jump, known_hosts):
    before, connect = jump.logins(), connector(SshOptions(known_hosts=known_hosts))

    def work(number):
        with connect(behind(jump, sshd), AMPLE) as runner:
            return runner.run(["echo", str(number)], deadline_seconds=AMPLE).stdout

    # Held open over all of them, since the connection is closed with its last user.
    with connect(behind(jump, sshd), AMPLE), ThreadPoolExecutor(12) as pool:
        assert list(pool.map(work, range(24))) == [f"{number}\n" for number in range(24)]
    assert jump.logins() == before + 1


def test_one_connection_to_the_jump_host_stays_and_is_opened_anew_when_it_broke(sshd, jump, known_hosts):
    before, opener = jump.logins(), ssh._Opener(SshOptions(known_hosts=known_hosts))
    bastion = behind(jump, sshd).jump
    first = opener.jump(bastion, AMPLE)
    for _ in range(2):
        with opener.opened(behind(jump, sshd), AMPLE) as transport:
            assert transport.is_active()
        assert opener.jump(bastion, AMPLE) is first
    first.close()
    assert opener.jump(bastion, AMPLE).is_active()
    assert jump.logins() == before + 2


def test_files_go_through_the_jump_host_too(sshd, jump, known_hosts, tmp_path):
    content = bytes(range(256)) * 8192
    with connector(SshOptions(known_hosts=known_hosts))(behind(jump, sshd), AMPLE) as runner:
        put(runner, content, str(tmp_path / "there"), deadline_seconds=AMPLE)
    assert (tmp_path / "there").read_bytes() == content


def test_a_jump_host_behind_a_jump_host(sshd, jump, known_hosts, tmp_path_factory):
    options = f"PermitOpen 127.0.0.1:{jump.port}\n"
    with running_sshd(tmp_path_factory.mktemp("outer"), addresses=["127.0.0.1"], options=options) as outer:
        known_hosts.write_text(known_hosts.read_text() + outer.known_hosts.read_text())
        node = behind(jump, sshd)
        first = dataclasses.replace(node.jump, name="outer", port=outer.port, key=outer.key)
        node = dataclasses.replace(node, jump=dataclasses.replace(node.jump, jump=first))
        with connector(SshOptions(known_hosts=known_hosts))(node, 30.0) as runner:
            assert runner.run(["echo", "far"], deadline_seconds=AMPLE).stdout == "far\n"


def test_each_host_is_compared_with_its_own_file_unless_one_is_given_for_all(sshd, jump, tmp_path):
    node = behind(jump, sshd)
    bastion = dataclasses.replace(node.jump, known_hosts=jump.known_hosts)
    node = dataclasses.replace(node, known_hosts=sshd.known_hosts, jump=bastion)
    with connector(SshOptions())(node, AMPLE) as runner:
        assert runner.run(["true"], deadline_seconds=AMPLE).exit_status == 0
    assert f"is not in {tmp_path / 'absent'}" in refused(node, tmp_path / "absent")


def refused(host, known_hosts, **options):
    with pytest.raises(Unreachable) as caught, contextlib.ExitStack() as stack:
        stack.enter_context(connector(SshOptions(known_hosts=known_hosts, **options))(host, 30.0))
    return str(caught.value)


def test_an_unknown_jump_host_is_refused_before_the_node_is_tried(sshd, jump, tmp_path):
    before = jump.logins(), sshd.logins()
    said = refused(behind(jump, sshd), sshd.known_hosts)
    assert said.startswith(f"the jump host 127.0.0.1 port {jump.port} has a ssh-ed25519 host key that")
    assert "rerun with --accept-new-host-keys" in said
    assert (jump.logins(), sshd.logins()) == before


def test_new_keys_of_jump_host_and_node_are_accepted_together(sshd, jump, tmp_path):
    path = tmp_path / "new"
    options = SshOptions(known_hosts=path, accept_new_host_keys=True)
    with connector(options)(behind(jump, sshd), AMPLE) as runner:
        assert runner.run(["true"], deadline_seconds=AMPLE).exit_status == 0
    assert path.read_text() == f"[127.0.0.1]:{jump.port} {jump.host_key}\n[127.0.0.1]:{sshd.port} {sshd.host_key}\n"


def test_a_changed_key_of_the_jump_host_is_refused_whatever_is_accepted(sshd, jump, tmp_path):
    path = tmp_path / "changed"
    path.write_text(f"[127.0.0.1]:{jump.port} {make_key(tmp_path / 'other')}\n")
    said = refused(behind(jump, sshd), path, accept_new_host_keys=True)
    assert said.startswith("the jump host")
    assert "another machine may be answering" in said


def test_a_changed_key_of_the_node_is_seen_through_the_jump_host(sshd, jump, tmp_path):
    path = tmp_path / "changed"
    path.write_text(jump.known_hosts.read_text() + f"[127.0.0.1]:{sshd.port} {make_key(tmp_path / 'other')}\n")
    said = refused(behind(jump, sshd), path)
    assert said.startswith(f"127.0.0.1 port {sshd.port} has the host key")


def test_a_node_the_jump_host_does_not_reach_differs_from_a_jump_host_that_is_down(sshd, jump, known_hosts):
    said = refused(behind(jump, sshd, address="127.0.0.2"), known_hosts)
    assert "127.0.0.2 port" in said
    assert "cannot be reached from the jump host (" in said
    (bastion,) = parse_hosts(f"127.0.0.1:{free_port()}")
    said = refused(dataclasses.replace(behind(jump, sshd), jump=bastion), known_hosts)
    assert said.startswith("the jump host 127.0.0.1 port")
    assert "cannot be reached" in said


def test_a_jump_host_that_failed_is_not_tried_again_for_each_node_behind_it(sshd, jump, known_hosts, monkeypatch):
    tried = []

    def create_connection(address, timeout):
        tried.append(address)
        raise ConnectionRefusedError("no")

    monkeypatch.setattr(ssh.socket, "create_connection", create_connection)
    connect = connector(SshOptions(known_hosts=known_hosts))
    for _ in range(3):
        with pytest.raises(Unreachable, match="the jump host 127"), connect(behind(jump, sshd), AMPLE):
            pass
    assert tried == [("127.0.0.1", jump.port)]


def test_a_tunnel_sends_nothing_after_its_end():
    class Channel:
        sent, closed = b"", False
        recv = settimeout = fileno = None  # passed on as they are

        def send(self, content):
            assert not self.closed
            self.sent += content
            return len(content)

        def close(self):
            self.closed = True

    tunnel = Tunnel(Channel())
    assert tunnel.send(b"before") == 6
    tunnel.close()
    with pytest.raises(OSError, match="closed"):
        tunnel.send(b"after")


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
    monkeypatch.setattr(ssh, "LOGINS_AT_ONCE", 1)
    monkeypatch.setattr(ssh, "CONNECT_SECONDS", AMPLE)  # the mute host would keep the one turn for so long
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
            assert not silent.done()
            accepted.close()
            assert isinstance(silent.exception(AMPLE), Unreachable)
