"""Which key opens a host: a file, one that the agent holds, or one of the usual names."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from cluster.inventory.hosts import parse_hosts
from cluster.transport.runner import Unreachable
from cluster.transport.ssh import SshOptions, connector
from tests.cluster.loopback_sshd import make_key, running_sshd
from tests.patience import AMPLE, scaled


@pytest.fixture(autouse=True)
def empty_home(monkeypatch, tmp_path):
    """A user without agent and without keys of their own."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".ssh").mkdir(parents=True)
    return tmp_path / "home"


@pytest.fixture
def agent(monkeypatch):
    """A private ssh-agent; its socket's path must be short. Adds key files."""
    folder = tempfile.mkdtemp(prefix="agent", dir="/tmp")
    socket = f"{folder}/socket"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", socket], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", socket)

        def add(*keys, **options):
            for key in keys:
                subprocess.run(["ssh-add", "-q", str(key)], check=True, **options)

        for _ in range(200):
            if os.path.exists(socket):
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        yield add
    finally:
        process.terminate()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def run(sshd, key=None):
    (host,) = parse_hosts(sshd.target())
    connect = connector(SshOptions(known_hosts=sshd.known_hosts))
    with connect(host.with_defaults(user=None, port=None, key=key), 30.0) as runner:
        return runner.run(["echo", "in"], deadline_seconds=AMPLE).stdout


def unsupported_reason(sshd, key=None):
    with pytest.raises(Unreachable) as caught:
        run(sshd, key)
    return str(caught.value)


def encrypted(sshd, folder):
    """A copy of the key that opens the server, behind a passphrase."""
    path = folder / "locked"
    shutil.copy(sshd.key, path)
    path.chmod(0o600)
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-P", "", "-N", "secret", "-f", str(path)], check=True, capture_output=True
    )
    return path


def test_without_any_key_the_sentence_says_so(sshd):
    assert "the agent and ~/.ssh hold no key to offer" in unsupported_reason(sshd)


def test_the_agents_key_opens_the_host(sshd, agent, tmp_path):
    make_key(tmp_path / "no_profile")
    agent(tmp_path / "no_profile", sshd.key)
    assert run(sshd) == "in\n"


def test_a_key_of_a_usual_name_opens_the_host(sshd, empty_home):
    shutil.copy(sshd.key, empty_home / ".ssh" / "id_ed25519")
    assert run(sshd) == "in\n"


def test_a_key_file_with_a_passphrase_asks_for_the_agent(sshd, tmp_path):
    said = unsupported_reason(sshd, encrypted(sshd, tmp_path))
    assert "needs a passphrase; add it to ssh-agent" in said


def test_a_key_file_with_a_passphrase_is_taken_from_the_agent(sshd, agent, tmp_path):
    path = encrypted(sshd, tmp_path)
    shutil.copy(sshd.key.with_suffix(".pub"), path.with_suffix(".pub"))
    for number in range(7):  # more than sshd accepts: the right one has to come first
        make_key(tmp_path / f"no_profile{number}")
        agent(tmp_path / f"no_profile{number}")
    agent(sshd.key)
    assert run(sshd, path) == "in\n"


def test_a_host_that_has_had_enough_of_wrong_keys_refuses_the_user(sshd, agent, tmp_path):
    for number in range(7):
        make_key(tmp_path / f"no_profile{number}")
        agent(tmp_path / f"no_profile{number}")
    assert "refuses user" in unsupported_reason(sshd)


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_other_kinds_of_key_are_read_too(sshd, tmp_path, kind):
    path = tmp_path / kind
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(path)], check=True)
    assert "refuses user" in unsupported_reason(sshd, path)  # offered, and not known there


def test_a_file_that_is_no_key_is_named(sshd, tmp_path):
    (tmp_path / "junk").write_text("junk")
    sentence = unsupported_reason(sshd, tmp_path / "junk")
    assert f"the private key {tmp_path}/junk for 127.0.0.1 port {sshd.port} cannot be used" in sentence
    assert "it holds no private key of a kind known here" in sentence
    assert "check that the node is up" not in sentence
    assert "(Is a directory)" in unsupported_reason(sshd, tmp_path)
    assert "without .pub" in unsupported_reason(sshd, sshd.key.with_suffix(".pub"))


@pytest.mark.skipif(os.geteuid() != 0, reason="sshd runs a command that looks keys up only as root")
def test_a_host_that_is_slow_to_log_in_has_not_refused_the_user(tmp_path):
    """It looks a key up for a minute; its refusal would come after the deadline."""
    (folder := tmp_path / "slow").mkdir()
    wrong = tmp_path / "wrong"
    make_key(wrong)
    slow = "AuthorizedKeysCommand /bin/sleep 60\nAuthorizedKeysCommandUser root\n"
    with running_sshd(folder, options=slow) as server:
        (host,) = parse_hosts(server.target())
        connect = connector(SshOptions(known_hosts=server.known_hosts))
        with (
            pytest.raises(Unreachable) as caught,
            connect(host.with_defaults(user=None, port=None, key=wrong), min(scaled(2.0), 10.0)),
        ):
            pass
    assert "did not finish the login" in str(caught.value)
    assert "refuses" not in str(caught.value)


def test_a_key_file_that_is_not_there_is_named(sshd):
    assert "no such file" in unsupported_reason(sshd, Path("/absent/key"))
