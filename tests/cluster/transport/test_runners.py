"""The same promises kept on this machine and over a real SSH connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.inventory.hosts import parse_hosts
from cluster.transport.reach import LocalRunner
from cluster.transport.runner import MAX_OUTPUT_BYTES, Collector, Runner, Unreachable
from cluster.transport.ssh import SshOptions, connector
from tests.cluster.loopback_sshd import LoopbackSshd
from tests.patience import AMPLE, scaled, wait_for_end


@pytest.fixture(params=["local", "ssh"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    if request.param == "local":
        yield LocalRunner()
        return
    sshd: LoopbackSshd = request.getfixturevalue("sshd")
    with open_runner(sshd) as opened:
        yield opened


def open_runner(sshd: LoopbackSshd):  # type: ignore[no-untyped-def]
    (host,) = parse_hosts(sshd.target())
    connect = connector(SshOptions(known_hosts=sshd.known_hosts))
    return connect(host.with_defaults(user=None, port=None, key=sshd.key), 10.0)


def test_every_argument_arrives_as_it_was_given(runner: Runner) -> None:
    arguments = ["two words", "$HOME", "a;b", "it's", '"', "new\nline", "*", "", "-n", "\\", "`id`", "größe"]
    done = runner.run(["printf", "[%s]", *arguments], deadline_seconds=AMPLE)
    assert done.stdout == "".join(f"[{argument}]" for argument in arguments)
    assert done.exit_status == 0


def test_input_streams_and_status_stay_apart(runner: Runner) -> None:
    done = runner.run(["sh", "-c", "cat; echo bad >&2; exit 7"], stdin="given", deadline_seconds=AMPLE)
    assert (done.stdout, done.stderr, done.exit_status) == ("given", "bad\n", 7)


def test_much_output_on_both_streams_blocks_nothing(runner: Runner) -> None:
    script = "head -c 3000000 /dev/zero >&2; head -c 3000000 /dev/zero"
    done = runner.run(["sh", "-c", script], deadline_seconds=AMPLE)
    assert (len(done.stdout), len(done.stderr), done.exit_status) == (3_000_000, 3_000_000, 0)


def test_a_command_that_prints_without_end_is_cut(runner: Runner) -> None:
    done = runner.run(["cat", "/dev/zero"], deadline_seconds=AMPLE)
    assert (len(done.stdout), done.exit_status) == (MAX_OUTPUT_BYTES, None)


def test_output_in_pieces_of_any_size_is_cut_at_the_limit() -> None:
    pieces = iter([b"12345", b"67890", b"more"])
    collected = Collector(lambda _: next(pieces, b""), limit_bytes=8)
    assert (collected.drain(), collected.text) == (False, "12345678")


def test_a_command_that_does_not_read_its_input_is_judged_by_its_status(runner: Runner) -> None:
    assert runner.run(["true"], stdin="x" * 5_000_000, deadline_seconds=AMPLE).exit_status == 0


def test_input_is_fed_in_pieces_as_they_come(runner: Runner) -> None:
    pieces = (bytes([number]) * 100_000 for number in b"abc")
    done = runner.run(["cat"], stdin=pieces, deadline_seconds=AMPLE)
    assert done.stdout == "a" * 100_000 + "b" * 100_000 + "c" * 100_000


def test_lines_of_both_streams_are_handed_on_while_the_command_runs(runner: Runner, tmp_path: Path) -> None:
    # The command goes on only after its first line was passed on.
    script = (
        f"echo one; until [ -e {tmp_path}/go ]; do sleep 0.05; done; echo two >&2; printf 'gr\\303\\266\\303\\237e'"
    )
    lines: list[str] = []

    def on_line(line: str) -> None:
        lines.append(line)
        (tmp_path / "go").touch()

    assert runner.stream(["sh", "-c", script], on_line, deadline_seconds=AMPLE) == 0
    assert lines[0] == "one"
    assert sorted(lines[1:]) == ["größe", "two"]  # two streams: which of them comes first is open


def test_a_stream_may_be_longer_than_what_is_kept_of_an_output(runner: Runner) -> None:
    count = 0

    def on_line(line: str) -> None:
        nonlocal count
        count += len(line)

    command = ["sh", "-c", f"head -c {MAX_OUTPUT_BYTES + 5_000_000} /dev/zero; exit 3"]
    assert runner.stream(command, on_line, deadline_seconds=AMPLE) == 3
    assert count == MAX_OUTPUT_BYTES + 5_000_000


def test_a_streamed_command_has_a_deadline_too(runner: Runner) -> None:
    lines: list[str] = []
    assert runner.stream(["sh", "-c", "echo begun; sleep 600"], lines.append, deadline_seconds=scaled(0.5)) is None
    assert lines == ["begun"]


def test_what_the_receiver_of_a_line_raises_is_raised(runner: Runner) -> None:
    def on_line(line: str) -> None:
        raise KeyError(line)

    with pytest.raises(KeyError, match="one"):
        runner.stream(["sh", "-c", "echo one; sleep 600"], on_line, deadline_seconds=AMPLE)


def test_the_deadline_ends_the_command_and_keeps_what_it_printed(runner: Runner, tmp_path: Path) -> None:
    script = f"echo $$ > {tmp_path}/pid; echo begun; sleep 600"
    done = runner.run(["sh", "-c", script], deadline_seconds=scaled(0.5))
    assert (done.stdout, done.exit_status) == ("begun\n", None)
    # The remote `timeout` keeps the deadline on its own clock, rounded up to whole seconds.
    wait_for_end([int((tmp_path / "pid").read_text())])


def test_a_connection_that_breaks_is_unreachable_not_a_status(sshd: LoopbackSshd) -> None:
    # The command ends the server process of its own connection: the parent of the `timeout` it runs under.
    script = "kill -9 $(awk '/^PPid/ { print $2 }' /proc/$PPID/status); sleep 5"
    with open_runner(sshd) as runner, pytest.raises(Unreachable, match="broke the connection"):
        runner.run(["sh", "-c", script], deadline_seconds=AMPLE)
