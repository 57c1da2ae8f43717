"""The files of OpenSSH: ssh_config decides what target and site leave open, known_hosts which key a host may show."""

from __future__ import annotations

import base64
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.inventory.hosts import Host, parse_hosts
from cluster.transport.runner import Unreachable
from cluster.transport.ssh import SshOptions, connector
from cluster.transport.ssh_files import BadHostKey, HostKey, KnownHosts, SshConfig
from tests.cluster.loopback_sshd import running_sshd
from tests.patience import AMPLE


def config(folder: Path, text: str) -> SshConfig:
    (folder / "config").write_text(text)
    return SshConfig([folder / "config", folder / "absent"])


def test_a_host_is_reached_as_the_file_says(tmp_path):
    read = config(
        tmp_path,
        "Host gpu*\n  HostName %h.cluster\n  User ops\n  Port 2222\n  IdentityFile ~/keys/ops\n  IdentitiesOnly yes\n"
        "  ProxyJump admin@bastion:22022\n  HostKeyAlias farm\nHost *\n  User someone\n  Port 7\n",
    )
    found = read.settings(Host(name="gpu01", address="gpu01"))
    assert (found.address, found.user, found.port, found.known_as) == ("gpu01.cluster", "ops", 2222, "farm")
    assert (found.key, found.key_files, found.key_files_only) == (None, (Path.home() / "keys" / "ops",), True)
    assert found.jump == parse_hosts("admin@bastion:22022")[0]
    assert read.settings(Host(name="other", address="other")).user == "someone"


def test_target_and_site_win_over_the_file(tmp_path):
    read = config(tmp_path, "Host *\n  User ops\n  Port 2222\n  IdentityFile /keys/ops\n  ProxyJump bastion\n")
    jump = Host(name="gate", address="gate")
    found = read.settings(Host(name="a", address="a", user="root", port=22, key=Path("/k"), jump=jump))
    assert (found.user, found.port, found.key, found.jump) == ("root", 22, Path("/k"), jump)
    assert read.settings(Host(name="bastion", address="bastion")).jump is None  # not through itself


def test_without_a_file_ssh_has_its_defaults(tmp_path):
    found = SshConfig([tmp_path / "absent"]).settings(Host(name="a", address="a"))
    assert (found.address, found.port, found.jump) == ("a", 22, None)
    assert (found.key_files, found.key_files_only) == (None, False)
    assert [found.known_as, replace(found, port=2222).known_as] == ["a", "[a]:2222"]


def test_included_files_hold_within_the_block_that_includes_them(tmp_path):
    (tmp_path / "more.d").mkdir()
    (tmp_path / "more.d" / "1.conf").write_text("Host gpu02\n  Port 22022\n")
    (tmp_path / "more.d" / "2.conf").write_text("Port 23\n")
    read = config(
        tmp_path, "Include more.d/1.conf\nHost old*\n  Include more.d/2.conf\n  User old\nHost *\n  User new\n"
    )
    ways = {name: read.settings(Host(name=name, address=name)) for name in ("gpu02", "old1", "gpu03")}
    assert {name: (found.port, found.user) for name, found in ways.items()} == {
        "gpu02": (22022, "new"), "old1": (23, "old"), "gpu03": (22, "new")
    }  # fmt: skip
    endless = config(tmp_path, "Include config\n")
    with pytest.raises(Unreachable, match="is included more than 16 files deep"):
        endless.settings(Host(name="a", address="a"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Host a\n  ProxyCommand nc %h %p\n", "ProxyCommand is not supported; use ProxyJump there, or ssh.jump"),
        ("Host a\n  Port many\n", "invalid literal"),
        ("Host a\n  ProxyJump x@@y\n", "has the user"),
        ("Host a\n  ???\n", "Unparsable line"),
    ],
)
def test_a_file_that_cannot_be_kept_is_one_sentence(tmp_path, text, said):
    with pytest.raises(Unreachable) as caught:
        config(tmp_path, text).settings(Host(name="a", address="a"))
    assert str(caught.value).startswith("the SSH configuration for a cannot be used (")
    assert said in str(caught.value)
    assert str(tmp_path / "config") in str(caught.value)


def test_a_name_that_only_the_file_knows_is_reached(tmp_path):
    (folder := tmp_path / "sshd").mkdir()
    with running_sshd(folder) as sshd:
        text = f"Host farm\n  HostName 127.0.0.1\n  Port {sshd.port}\n  IdentityFile {sshd.key}\n"
        (tmp_path / "config").write_text(text)
        connect = connector(SshOptions(known_hosts=sshd.known_hosts, config=(tmp_path / "config",)))
        with connect(Host(name="farm", address="farm"), 30.0) as runner:
            assert runner.run(["echo", "in"], deadline_seconds=AMPLE).stdout == "in\n"


def key(letter, kind="ssh-ed25519"):
    return HostKey(kind, len(kind).to_bytes(4, "big") + kind.encode() + b"\0\0\0\x20" + letter.encode() * 32)


def line(names, host_key, marker=""):
    return f"{marker} {names} {host_key.kind} {base64.b64encode(host_key.blob).decode()} comment\n".lstrip()


def known(tmp_path, text, accept_new=False):
    path = tmp_path / "known_hosts"
    path.write_text(text)
    return KnownHosts(tmp_path / "absent", path, accept_new=accept_new)


A, B, RSA = key("a"), key("b"), key("r", "ssh-rsa")


@pytest.mark.parametrize(
    ("names", "name"),
    [
        ("gpu01", "gpu01"),
        ("gpu01,10.0.0.1", "10.0.0.1"),
        ("[gpu01]:2222", "[gpu01]:2222"),
        ("gpu*", "gpu01"),
        ("gpu0?.lab", "gpu01.lab"),
        ("*,!gpu02", "gpu01"),
        ("[127.0.0.*]:22", "[127.0.0.9]:22"),
    ],
)
def test_a_line_holds_for_the_names_it_says(tmp_path, names, name):
    book = known(tmp_path, "# comment\n\n" + line(names, A))
    book.verify(name, A)
    assert book.keys(name) == [A]
    with pytest.raises(BadHostKey) as caught:
        book.verify(name, B)
    assert caught.value.expected == A


@pytest.mark.parametrize(
    ("names", "name"), [("gpu01", "gpu011"), ("gpu01", "[gpu01]:2222"), ("*,!gpu02", "gpu02"), ("gpu?", "gpu01")]
)
def test_a_line_does_not_hold_for_others(tmp_path, names, name):
    with pytest.raises(BadHostKey, match="unknown"):
        known(tmp_path, line(names, A)).verify(name, A)


def test_names_hashed_by_openssh_are_found(tmp_path):
    path = tmp_path / "known_hosts"
    path.write_text(line("gpu01,[gpu02]:2222", A))
    subprocess.run(["ssh-keygen", "-H", "-f", str(path)], check=True, capture_output=True)
    assert "gpu" not in path.read_text()
    book = KnownHosts(path)
    book.verify("gpu01", A)
    book.verify("[gpu02]:2222", A)
    with pytest.raises(BadHostKey, match="unknown"):
        book.verify("gpu03", A)


@pytest.mark.parametrize("names", ["gpu01.lab", "GPU01.lab", "GPU??.lab", "hashed"])
def test_capitals_in_a_name_make_no_other_host(tmp_path, names):
    """Else a changed key would be a new one under the name in other letters, as OpenSSH never takes it."""
    book = known(tmp_path, line("gpu01.lab" if names == "hashed" else names, A), accept_new=True)
    if names == "hashed":
        subprocess.run(["ssh-keygen", "-H", "-f", str(tmp_path / "known_hosts")], check=True, capture_output=True)
    for name in ("gpu01.lab", "GPU01.LAB"):
        book.verify(name, A)
        with pytest.raises(BadHostKey, match="changed"):
            book.verify(name, B)


def test_a_key_of_another_kind_is_a_changed_key_even_where_new_ones_are_welcome(tmp_path):
    book = known(tmp_path, line("gpu01", A), accept_new=True)
    with pytest.raises(BadHostKey) as caught:
        book.verify("gpu01", RSA)
    assert caught.value.expected == A


def test_one_of_several_known_keys_is_enough(tmp_path):
    book = known(tmp_path, line("gpu01", A) + line("gpu01", RSA))
    book.verify("gpu01", RSA)
    assert book.keys("gpu01") == [A, RSA]


@pytest.mark.parametrize("names", ["*", "gpu02"])  # a key that one host has lost is no other host's either
def test_a_revoked_key_is_refused_whatever_else_is_said(tmp_path, names):
    book = known(tmp_path, line("gpu01", A) + line(names, A, "@revoked"), accept_new=True)
    with pytest.raises(BadHostKey, match="revoked"):
        book.verify("gpu01", A)


def test_a_certificate_authority_is_no_host(tmp_path):
    with pytest.raises(BadHostKey, match="unknown"):
        known(tmp_path, line("gpu01", A, "@cert-authority")).verify("gpu01", A)


def test_a_new_key_is_written_down_once_and_holds_at_once(tmp_path):
    book = known(tmp_path, "# ours", accept_new=True)
    book.verify("gpu01", A)
    book.verify("gpu01", A)
    assert (tmp_path / "known_hosts").read_text().splitlines() == [
        "# ours",
        line("gpu01", A).removesuffix(" comment\n"),
    ]
    with pytest.raises(BadHostKey):
        book.verify("gpu01", B)


def test_lines_that_another_program_adds_are_seen(tmp_path):
    book = known(tmp_path, "")
    with pytest.raises(BadHostKey, match="unknown"):
        book.verify("gpu01", A)
    (tmp_path / "known_hosts").write_text(line("gpu01", A))
    book.verify("gpu01", A)


@pytest.mark.parametrize(
    "text", ["gpu01 ssh-ed25519 AAA\n", "gpu01 ssh-ed25519\n", "gpu01 ssh-rsa " + "QUJD" * 9 + "\n"]
)
def test_a_line_without_a_key_is_an_error_and_not_skipped(tmp_path, text):
    with pytest.raises(Unreachable, match=r"known_hosts has the line 'gpu01 .*', which holds no key; correct it"):
        known(tmp_path, text).verify("gpu01", A)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(Unreachable, match="cannot be read"):
        KnownHosts(tmp_path).verify("gpu01", A)


def test_fingerprints_are_those_of_ssh_keygen(tmp_path):
    (tmp_path / "k").write_text(line("x", A).removeprefix("x "))
    printed = subprocess.run(
        ["ssh-keygen", "-l", "-f", str(tmp_path / "k")], capture_output=True, text=True, check=True
    )
    assert A.fingerprint in printed.stdout
