"""A file arrives whole or not at all, on this machine and over a real SSH connection."""

import hashlib
import os

import pytest

from cluster.inventory.hosts import parse_hosts
from cluster.transport.reach import LocalRunner
from cluster.transport.ssh import SshOptions, connector
from cluster.transport.transfer import TransferFailed, put
from tests.patience import AMPLE, scaled

CONTENT = os.urandom(3_000_000)


@pytest.fixture(params=["local", "ssh"])
def runner(request):
    if request.param == "local":
        yield LocalRunner()
        return
    sshd = request.getfixturevalue("sshd")
    (host,) = parse_hosts(sshd.target())
    connect = connector(SshOptions(known_hosts=sshd.known_hosts))
    with connect(host.with_defaults(user=None, port=None, key=sshd.key), 30.0) as opened:
        yield opened


@pytest.mark.parametrize("content", [CONTENT, b""], ids=["much", "nothing"])
def test_bytes_arrive_under_a_name_that_needs_quotes(runner, tmp_path, content):
    place = tmp_path / "it's a $HOME;file\n"
    digest = put(runner, content, str(place), deadline_seconds=AMPLE, mode=0o600)
    assert place.read_bytes() == content
    assert digest == hashlib.sha256(content).hexdigest()
    assert place.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [place]


def test_a_file_replaces_an_older_one(runner, tmp_path):
    (tmp_path / "there").write_text("old")
    put(runner, CONTENT, str(tmp_path / "there"), deadline_seconds=AMPLE)
    assert (tmp_path / "there").read_bytes() == CONTENT


def test_a_folder_that_is_not_there_is_one_sentence(runner, tmp_path):
    with pytest.raises(TransferFailed, match=r"cannot be written .*check folder and disk there"):
        put(runner, CONTENT, str(tmp_path / "absent" / "file"), deadline_seconds=AMPLE)


def test_a_disk_that_is_full_is_one_sentence_and_leaves_the_old_file(runner, tmp_path):
    class Full:
        """A host on which no file may grow beyond 512 KiB, as on a disk that is full then."""

        def run(self, command, **options):
            return runner.run([*command[:2], "ulimit -f 1000; " + command[2], *command[3:]], **options)

    (tmp_path / "file").write_text("old")
    with pytest.raises(TransferFailed, match="cannot be written"):
        put(Full(), CONTENT, str(tmp_path / "file"), deadline_seconds=AMPLE)
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_in_the_place_of_the_file_takes_nothing(runner, tmp_path):
    (tmp_path / "taken" / "old").mkdir(parents=True)
    with pytest.raises(TransferFailed, match="cannot take its name"):
        put(runner, b"new", str(tmp_path / "taken"), deadline_seconds=AMPLE)
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_deadline_is_one_sentence_and_nothing_stays(tmp_path):
    class Late(LocalRunner):
        """A host that writes and then takes its time."""

        def run(self, command, **options):
            if "cat >" in command[2]:
                command = [*command[:2], command[2] + "; sleep 600", *command[3:]]
            return super().run(command, **options)

    deadline = scaled(0.5)
    with pytest.raises(TransferFailed, match=f"was not written within {deadline:g} s; give it more time"):
        put(Late(), b"new", str(tmp_path / "file"), deadline_seconds=deadline)
    assert list(tmp_path.iterdir()) == []


def test_what_was_changed_on_the_way_is_not_kept(tmp_path):
    class Damaging(LocalRunner):
        """A host on which every file is written with one byte too many."""

        def run(self, command, **options):
            return super().run([*command[:2], command[2].replace("cat >", "(cat; echo) >"), *command[3:]], **options)

    (tmp_path / "file").write_text("old")
    with pytest.raises(TransferFailed, match="arrived with the checksum"):
        put(Damaging(), b"new", str(tmp_path / "file"), deadline_seconds=AMPLE)
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_relative_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected an absolute path"):
        put(LocalRunner(), b"", "file", deadline_seconds=1)
