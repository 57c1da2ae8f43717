"""known_hosts files: names, ports, hashes, patterns and markers decide which key a host may show."""

import base64
import subprocess

import pytest

from cluster.transport.runner import Unreachable
from cluster.transport.ssh.known_hosts import ChangedHostKey, HostKey, KnownHosts, UnknownHostKey, host_name


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
        ("[gpu01]:2222", host_name("gpu01", 2222)),
        ("gpu*", "gpu01"),
        ("gpu0?.lab", "gpu01.lab"),
        ("*,!gpu02", "gpu01"),
        ("[127.0.0.*]:22", "[127.0.0.9]:22"),
    ],
)
def test_a_line_holds_for_the_names_it_says(tmp_path, names, name):
    book = known(tmp_path, "# comment\n\n" + line(names, A))
    book.verify(name, A)
    assert book.kinds(name) == ["ssh-ed25519"]
    with pytest.raises(ChangedHostKey) as caught:
        book.verify(name, B)
    assert caught.value.expected == A


@pytest.mark.parametrize(
    ("names", "name"), [("gpu01", "gpu011"), ("gpu01", "[gpu01]:2222"), ("*,!gpu02", "gpu02"), ("gpu?", "gpu01")]
)
def test_a_line_does_not_hold_for_others(tmp_path, names, name):
    with pytest.raises(UnknownHostKey):
        known(tmp_path, line(names, A)).verify(name, A)


def test_names_hashed_by_openssh_are_found(tmp_path):
    path = tmp_path / "known_hosts"
    path.write_text(line("gpu01,[gpu02]:2222", A))
    subprocess.run(["ssh-keygen", "-H", "-f", str(path)], check=True, capture_output=True)
    assert "gpu" not in path.read_text()
    book = KnownHosts(path)
    book.verify("gpu01", A)
    book.verify("[gpu02]:2222", A)
    with pytest.raises(UnknownHostKey):
        book.verify("gpu03", A)


def test_a_key_of_another_kind_is_a_changed_key_even_where_new_ones_are_welcome(tmp_path):
    book = known(tmp_path, line("gpu01", A), accept_new=True)
    with pytest.raises(ChangedHostKey) as caught:
        book.verify("gpu01", RSA)
    assert caught.value.expected == A


def test_one_of_several_known_keys_is_enough(tmp_path):
    book = known(tmp_path, line("gpu01", A) + line("gpu01", RSA))
    book.verify("gpu01", RSA)
    assert book.kinds("gpu01") == ["ssh-ed25519", "ssh-rsa"]


def test_a_revoked_key_is_refused_whatever_else_is_said(tmp_path):
    book = known(tmp_path, line("gpu01", A) + line("*", A, "@revoked"), accept_new=True)
    with pytest.raises(ChangedHostKey) as caught:
        book.verify("gpu01", A)
    assert caught.value.expected is None


def test_a_certificate_authority_is_no_host(tmp_path):
    with pytest.raises(UnknownHostKey):
        known(tmp_path, line("gpu01", A, "@cert-authority")).verify("gpu01", A)


def test_a_new_key_is_written_down_once_and_holds_at_once(tmp_path):
    book = known(tmp_path, "# ours", accept_new=True)
    book.verify("gpu01", A)
    book.verify("gpu01", A)
    assert (tmp_path / "known_hosts").read_text().splitlines() == [
        "# ours",
        line("gpu01", A).removesuffix(" comment\n"),
    ]
    with pytest.raises(ChangedHostKey):
        book.verify("gpu01", B)


def test_lines_that_another_program_adds_are_seen(tmp_path):
    book = known(tmp_path, "")
    with pytest.raises(UnknownHostKey):
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
