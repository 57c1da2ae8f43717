"""`~/.ssh/config` decides what target and site leave open; one that cannot be followed is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.inventory.hosts import Host, parse_hosts
from cluster.transport.runner import Unreachable
from cluster.transport.ssh import SshOptions, connector
from cluster.transport.ssh.config import SshConfig
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
    way = read.way(Host(name="gpu01", address="gpu01"))
    assert (way.address, way.user, way.port, way.host_key_alias) == ("gpu01.cluster", "ops", 2222, "farm")
    assert (way.key, way.key_files, way.key_files_only) == (None, (Path.home() / "keys" / "ops",), True)
    assert way.jump == parse_hosts("admin@bastion:22022")[0]
    assert read.way(Host(name="other", address="other")).user == "someone"


def test_target_and_site_win_over_the_file(tmp_path):
    read = config(tmp_path, "Host *\n  User ops\n  Port 2222\n  IdentityFile /keys/ops\n  ProxyJump bastion\n")
    jump = Host(name="gate", address="gate")
    way = read.way(Host(name="a", address="a", user="root", port=22, key=Path("/k"), jump=jump))
    assert (way.user, way.port, way.key, way.jump) == ("root", 22, Path("/k"), jump)
    assert read.way(Host(name="bastion", address="bastion")).jump is None  # not through itself


def test_without_a_file_ssh_has_its_defaults(tmp_path):
    way = SshConfig([tmp_path / "absent"]).way(Host(name="a", address="a"))
    assert (way.address, way.port, way.key_files, way.key_files_only, way.jump) == ("a", 22, None, False, None)


def test_included_files_hold_within_the_block_that_includes_them(tmp_path):
    (tmp_path / "more.d").mkdir()
    (tmp_path / "more.d" / "1.conf").write_text("Host gpu02\n  Port 22022\n")
    (tmp_path / "more.d" / "2.conf").write_text("Port 23\n")
    read = config(
        tmp_path, "Include more.d/1.conf\nHost old*\n  Include more.d/2.conf\n  User old\nHost *\n  User new\n"
    )
    ways = {name: read.way(Host(name=name, address=name)) for name in ("gpu02", "old1", "gpu03")}
    assert {name: (way.port, way.user) for name, way in ways.items()} == {
        "gpu02": (22022, "new"), "old1": (23, "old"), "gpu03": (22, "new")
    }  # fmt: skip
    endless = config(tmp_path, "Include config\n")
    with pytest.raises(Unreachable, match="is included more than 16 files deep"):
        endless.way(Host(name="a", address="a"))


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
        config(tmp_path, text).way(Host(name="a", address="a"))
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
