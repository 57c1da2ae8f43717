"""The script that carries all probes, run by a real shell."""

import pytest

from cluster.probing.probe import Output, Probe, parse_outputs, printable, render_script
from cluster.transport.reach import LocalRunner
from tests.patience import AMPLE, scaled

MARK = "0123456789abcdef"


def run(probes: dict[str, Probe], deadline_seconds: float = AMPLE) -> dict[str, Output]:
    done = LocalRunner().run(["sh", "-s"], stdin=render_script(probes, MARK), deadline_seconds=deadline_seconds)
    return parse_outputs(done.stdout, MARK)


@pytest.mark.parametrize(
    ("script", "text", "status"),
    [
        ("echo one; echo two", "one\ntwo", 0),
        ("printf 'no line break'", "no line break", 0),
        ("true", "", 0),
        ("echo lost >&2; exit 9", "lost", 9),
        ("printf 'a\\n\\n'", "a\n", 0),
        ("printf '%s' 'back\\slash  two blanks '", "back\\slash  two blanks ", 0),
        ("echo exit 0; exit 3", "exit 0", 3),
        ("no-such-program-here", None, 127),
        ("cat", "", 0),
        ('echo "it\'s $((1 + 1))"', "it's 2", 0),
    ],
)
def test_output_and_status_of_a_probe_come_back_unchanged(script: str, text: str | None, status: int) -> None:
    output = run({"check": Probe(script=script)})["check"]
    assert output.exit_status == status
    assert text is None or output.text == text


def test_many_probes_keep_their_lines_apart() -> None:
    probes = {f"check{n}": Probe(script=f"for i in 1 2 3 4 5 6 7 8 9; do echo {n}-$i; done") for n in range(12)}
    outputs = run(probes)
    assert {name: output.text.splitlines() for name, output in outputs.items()} == {
        f"check{n}": [f"{n}-{i}" for i in range(1, 10)] for n in range(12)
    }


def test_a_hanging_probe_is_ended_and_takes_nothing_from_the_others() -> None:
    slow = Probe(script="echo begun; sleep 600", seconds=scaled(0.5))
    outputs = run({"slow": slow, "quick": Probe(script="echo here")})
    assert outputs["quick"] == Output(text="here", exit_status=0)
    assert outputs["slow"].timed_out
    assert outputs["slow"].text == "begun"


def test_what_was_printed_before_the_nodes_deadline_is_kept() -> None:
    probes = {"slow": Probe(script="echo begun; sleep 600", seconds=AMPLE), "quick": Probe(script="echo here")}
    outputs = run(probes, scaled(1.5))  # long enough for both to begin on a busy machine
    assert outputs["quick"].text == "here"
    assert outputs["slow"] == Output(text="begun", exit_status=None)
    assert outputs["slow"].timed_out


def test_a_script_cut_short_runs_nothing() -> None:
    script = render_script({"check": Probe(script="echo ran")}, MARK)
    half = script[: script.rindex("main\n")]
    done = LocalRunner().run(["sh", "-s"], stdin=half, deadline_seconds=AMPLE)
    assert parse_outputs(done.stdout, MARK) == {}


def test_lines_of_a_login_banner_are_passed_over() -> None:
    text = f"Welcome to gpu01\n{MARK} disk / is fine\n{MARK} disk \n{MARK} disk exit 0\nother disk exit 1\n"
    assert parse_outputs(text, MARK) == {"disk": Output(text="/ is fine", exit_status=0)}


def test_a_node_without_timeout_says_so_instead_of_looking_like_one_without_gpus() -> None:
    script = "PATH=/nowhere\n" + render_script({"gpus": Probe(script="true")}, MARK).replace(
        "PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:", "PATH=$PATH:"
    )
    done = LocalRunner().run(["/bin/sh", "-s"], stdin=script, deadline_seconds=AMPLE)
    assert parse_outputs(done.stdout, MARK) == {}
    assert "timeout is missing" in done.stderr


def test_control_characters_never_reach_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07") == "a?[31mb?"
