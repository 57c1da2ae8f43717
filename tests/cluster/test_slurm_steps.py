"""Commands as steps of a Slurm job: what is sent to srun, and what comes back from the program on the node."""

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.inventory.hosts import Host
from cluster.transport.reach import address_of, connection
from cluster.transport.runner import Unreachable
from cluster.transport.slurm.limit import job_end
from cluster.transport.slurm.steps import Bracketed, srun_command, srun_environment, step_input
from tests.patience import AMPLE, running, scaled, wait_for_end
from tests.programs import shell_program

NODE = Host(name="gpu01", address="gpu01", slurm_job="7", ranks=8)
MARK = "0123abcd"


def test_srun_gets_the_node_the_job_and_every_argument_as_it_is() -> None:
    words = ["printf", "%s|", "a b", "$HOME", "'q'", "", "*", "--nodes=9"]
    command = srun_command(NODE, MARK, 9.0, words)
    assert command[:6] == ["srun", "--jobid=7", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=gpu01"]
    assert command[-len(words) :] == words


def test_variables_that_stand_for_options_of_srun_do_not_reach_it() -> None:
    given = {"PATH": "/bin", "SLURM_CONF": "/c", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "9", "SLURM_EXPORT_ENV": "NONE"}
    assert srun_environment(given) == {"PATH": "/bin", "SLURM_CONF": "/c", "SLURM_JOB_ID": "7"}


def started(seconds: float, *command: str, **variables: str) -> subprocess.Popen[bytes]:
    """The program of a step, as srun would start it here."""
    whole = srun_command(NODE, MARK, seconds, command)
    return subprocess.Popen(
        whole[whole.index("sh") :],
        env={"PATH": "/usr/bin:/bin", **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def fed(process: subprocess.Popen[bytes]) -> Bracketed:
    """A reader of the step's output, after its program and an empty input were sent."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin as pipe:
        pipe.writelines(step_input(""))
    return Bracketed(process.stdout.read1, MARK)  # type: ignore[attr-defined]


def content(reader: Bracketed) -> bytes:
    found = b""
    while chunk := reader.read(1 << 16):
        found += chunk
    return found


def answered(seconds: float, *command: str, stdin: bytes = b"", **variables: str) -> tuple[bytes, bytes, str]:
    """Output, error output and trailer of a command."""
    with started(seconds, *command, **variables) as process:
        out, err = process.communicate(b"".join(step_input([stdin])), timeout=AMPLE)
    assert process.returncode == 0
    stdout, stderr = bracketed(out), bracketed(err)
    return content(stdout), content(stderr), stdout.trailer


def bracketed(text: bytes, size: int = 1 << 16) -> Bracketed:
    """A reader of this text, which arrives in pieces of so many bytes."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return Bracketed(lambda _: pieces.pop(0) if pieces else b"", MARK)


def test_output_input_and_exit_status_pass_through_the_step_unchanged() -> None:
    assert answered(AMPLE, "sh", "-c", "cat; printf err >&2; exit 3", stdin=b"\0\xff\n") == (b"\0\xff\n", b"err", "3")
    assert answered(AMPLE, "sh", "-c", "kill -9 $$")[2] == "137"
    assert answered(AMPLE, "/absent/program")[1:] == (b"/absent/program: No such file or directory\n", "127")


def test_a_command_that_reaches_its_deadline_is_ended_on_the_node() -> None:
    out, _, trailer = answered(scaled(1.0), "sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.1; done")
    assert trailer == "deadline"
    wait_for_end([int(out)])


def test_the_variables_of_the_step_do_not_reach_the_command() -> None:
    out, _, _ = answered(AMPLE, "env", SLURM_PROCID="0", SLURM_JOB_ID="7", PMI_RANK="0", CUDA_VISIBLE_DEVICES="3")
    names = {line.partition(b"=")[0] for line in out.splitlines()}
    assert {b"SLURM_JOB_ID", b"CUDA_VISIBLE_DEVICES"} <= names
    assert not {b"SLURM_PROCID", b"PMI_RANK"} & names


def test_a_step_lasts_as_long_as_something_that_its_command_has_left() -> None:
    leaves = "setsid sleep 600 > /dev/null 2>&1 & echo $!"
    with started(AMPLE, "sh", "-c", leaves) as process:
        reader = fed(process)
        pid = content(reader).decode().strip()
        assert reader.trailer == "0 and more"
        assert process.poll() is None
        subprocess.run(["kill", pid], check=True)
        assert process.wait(AMPLE) == 0


def test_the_end_of_a_step_ends_all_that_its_command_has_left_before_its_task() -> None:
    """Also what ignores TERM and what has a session of its own: Slurm may not find it after the task."""
    leaves = "trap '' TERM; setsid sleep 600 > /dev/null 2>&1 & echo $!"
    with started(AMPLE, "sh", "-c", leaves) as process:
        reader = fed(process)
        pid = int(content(reader))
        process.terminate()
        assert process.wait(AMPLE) == 128 + signal.SIGTERM
        assert not running(pid)


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 16])
def test_what_srun_and_a_prolog_print_is_no_part_of_the_output(size: int) -> None:
    text = f"prolog {MARK[:4]}\n{MARK}+\nfirst {MARK[:5]}\n{MARK}second{MARK}-0 and more\nsrun: error: late\n"
    reader = bracketed(text.encode(), size)
    assert content(reader) == f"first {MARK[:5]}\n{MARK}second".encode()
    assert (reader.trailer, reader.outside) == ("0 and more", f"prolog {MARK[:4]}\n")


@pytest.mark.parametrize("size", [1, 1 << 16])
def test_a_step_that_breaks_off_leaves_what_came_until_then(size: int) -> None:
    reader = bracketed(f"{MARK}+\nhalf a{MARK[:3]}".encode(), size)
    assert content(reader) == f"half a{MARK[:3]}".encode()
    assert (reader.begun, reader.trailer) == (True, "")
    none = bracketed(b"srun: error: Unable to create step\n", size)
    assert content(none) == b""
    assert (none.begun, none.outside) == (False, "srun: error: Unable to create step\n")


def test_a_node_of_a_job_needs_srun_and_nothing_of_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "paramiko", None)
    connect = connection([NODE])
    with connect(NODE, AMPLE) as runner, pytest.raises(Unreachable, match=r"job 7, and srun is not on the PATH"):
        runner.run(["true"], deadline_seconds=AMPLE)
    assert address_of(replace(NODE, address="10.0.0.7")) == "10.0.0.7"


def as_srun(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Let this shell script be srun, and the only program on the PATH."""
    shell_program(folder / "srun", script)
    monkeypatch.setenv("PATH", str(folder))


def test_a_step_that_does_not_begin_in_time_is_given_up_and_its_srun_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    as_srun(monkeypatch, tmp_path, f"echo $$ > {tmp_path}/pid; exec /bin/sleep 600")
    seconds = scaled(2.0)
    with connection([NODE])(NODE, seconds) as runner, pytest.raises(Unreachable) as caught:
        runner.run(["true"], deadline_seconds=AMPLE)
    assert f"on gpu01 in job 7 (no step began within {seconds:g} s); see scontrol show job 7" in str(caught.value)
    wait_for_end([int((tmp_path / "pid").read_text())])


def test_a_step_that_ends_before_its_command_is_no_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_srun(monkeypatch, tmp_path, 'PATH=/usr/bin:/bin; while [ "$1" != sh ]; do shift; done; exec "$@"')
    with connection([NODE])(NODE, AMPLE) as runner:
        assert runner.run(["sh", "-c", "exit 4"], deadline_seconds=AMPLE).exit_status == 4
        with pytest.raises(Unreachable, match="the step ended before its command"):
            runner.run(["sh", "-c", "kill -9 $PPID"], deadline_seconds=AMPLE)


@pytest.fixture
def sentences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setenv("PATH", str(tmp_path))  # without squeue
    return []


@pytest.mark.usefixtures("sentences")
def test_without_squeue_the_end_of_a_job_is_the_variables(sentences: list[str]) -> None:
    assert job_end(sentences.append, {}) is None
    end = job_end(sentences.append, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1800000000"})
    assert end is not None
    assert end.timestamp() == 1_800_000_000
    assert sentences == []


def test_the_end_of_a_task_is_read_where_its_number_also_names_the_whole_array(
    sentences: list[str], tmp_path: Path
) -> None:
    shell_program(tmp_path / "squeue", "echo '8 2026-11-22T10:00:00'; echo '7 2026-11-22T12:00:00'; echo '9 N/A'")
    ends = [job_end(sentences.append, {"SLURM_JOB_ID": job, "PATH": str(tmp_path)}) for job in ("7", "8", "9")]
    assert [end and end.hour for end in ends] == [12, 10, None]
    assert sentences == []
    assert job_end(sentences.append, {"SLURM_JOB_ID": "6", "PATH": str(tmp_path)}) is None
    assert "job 6 is not known (squeue does not list it)" in sentences[0]


def test_an_end_that_nobody_knows_is_said(sentences: list[str]) -> None:
    assert job_end(sentences.append, {"SLURM_JOB_ID": "7"}) is None
    (said,) = sentences
    assert said.startswith("the end of Slurm's job 7 is not known")
