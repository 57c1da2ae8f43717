"""Files that a user names are read whole, or refused in a sentence: never waited for, never without end."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.files.errors import UsageError
from cluster.files.filesystem import MAX_BYTES, read_text
from cluster.inventory.file import read_inventory
from cluster.inventory.hosts import read_hosts
from cluster.inventory.hosts_file import import_hosts
from cluster.inventory.site import load_site
from harness.cli import main
from harness.spec.experiment import load_experiment
from harness.training.file import load_training

READERS: dict[str, Callable[[Path], object]] = {
    "experiment": load_experiment,
    "training": load_training,
    "site": load_site,
    "inventory": lambda path: read_inventory(path.rename(path.with_suffix(".yaml"))),
    "hosts": read_hosts,
    "import": import_hosts,
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_a_pipe_that_nothing_is_written_to(reader, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="is a named pipe; give a regular file"):
        READERS[reader](tmp_path / "pipe")


@pytest.mark.parametrize("reader", [name for name in READERS if name != "inventory"])
def test_every_reader_refuses_a_device_without_end(reader):
    with pytest.raises(UsageError, match=r"/dev/zero: the .* is a device; give a regular file"):
        READERS[reader](Path("/dev/zero"))


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_what_is_too_large_to_be_meant(reader, tmp_path):
    path = tmp_path / "huge"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # no room on the disk is taken, and none in memory
    with pytest.raises(UsageError, match="is larger than 4 MiB; give a smaller one"):
        READERS[reader](path)


def test_a_socket_and_a_directory_are_no_files(tmp_path):
    with pytest.raises(UsageError, match="is a directory"):
        read_text(tmp_path, "site file")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        with pytest.raises(UsageError, match="cannot read the site file"):
            read_text(tmp_path / "s", "site file")


def test_a_file_of_the_largest_size_is_read_whole(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"a" * MAX_BYTES)
    assert len(read_text(path, "site file")) == MAX_BYTES


@pytest.mark.parametrize("command", [["plan"], ["train"], ["cluster", "nodes", "--import"]])
def test_commands_answer_about_a_pipe_in_one_sentence(command, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main([*command, str(tmp_path / "pipe")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "is a named pipe; give a regular file" in said
