"""Ctrl-C pressed again and again ends a run once, in order."""

from __future__ import annotations

import atexit
import contextlib
import csv
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.base import interrupts
from harness.base.interrupts import (
    PATIENCE_SECONDS,
    SIGNALS,
    deferred,
    end_at_once,
    end_requested,
    interrupted_once,
    interruptible,
    look,
)
from harness.cli import main
from tests.patience import AMPLE, wait_until
from tests.slow import slow

PROJECT = Path(__file__).parents[3]
EXPERIMENT = """\
task: train
model: tiny
sweep: {cp_size: [1, 2]}
fixed: {method: burst, seq_len: 128, dtype: fp32}
steps: {warmup: 1, measured: 100000}
limits: {trial_seconds: 3600}
"""


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves the handlers and the end of this process as they were: an interrupted block stays in force."""
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(interrupts, "_current", None)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:  # whoever started the tests may ignore some, as nohup does
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def now(undone: None, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock to be turned, of a process that is left as it was."""
    clock = [1000.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: clock[0])
    return clock


def press(number: int = signal.SIGINT) -> None:
    signal.raise_signal(number)


def test_the_first_signal_interrupts_and_the_next_get_a_sentence(now, capfd):
    with pytest.raises(KeyboardInterrupt), interrupted_once():
        press()
    for number in SIGNALS:  # the block is left, its end goes on
        press(number)
    assert capfd.readouterr().err.splitlines() == [interrupts._SENTENCE.rstrip("\n")] * len(SIGNALS)


def test_what_is_done_at_an_interruption_is_not_broken_off(now):
    done = []
    with interrupted_once():
        try:
            press(signal.SIGTERM)
        except KeyboardInterrupt:
            press()
            done.append("record")
    assert done == ["record"]


def test_an_end_that_hangs_can_be_broken_off(now):
    with interrupted_once():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                press()
            now[0] += PATIENCE_SECONDS - 1
            press()
            now[0] += 1


def test_a_block_that_nothing_interrupted_leaves_no_trace(now):
    def ours(number: int, frame: object) -> None: ...

    signal.signal(signal.SIGTERM, ours)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    with interrupted_once():
        press(signal.SIGHUP)
        assert signal.getsignal(signal.SIGTERM) is not ours
    assert signal.getsignal(signal.SIGTERM) is ours
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_without_a_terminal_the_sentence_goes_nowhere(now, monkeypatch):
    monkeypatch.setattr(sys, "__stderr__", None)
    with pytest.raises(KeyboardInterrupt), interrupted_once():
        press()
    press()


def test_a_signal_of_which_nothing_came_is_raised_at_the_next_look(now):
    look()  # outside of a block there is nothing to see
    with interruptible():
        look()
        assert not end_requested()
        with contextlib.suppress(BaseException):
            press()
        assert end_requested()
        with pytest.raises(KeyboardInterrupt):
            look()


def test_a_deferred_block_is_finished_unless_its_loops_look(now):
    done = []

    @deferred()
    def write_record() -> None:
        press()
        done.append("record")

    with interruptible():
        write_record()
        assert done == ["record"]
        with pytest.raises(KeyboardInterrupt):
            look()


def test_a_second_signal_breaks_off_a_deferred_block_that_hangs(now):
    with interruptible(), deferred():
        press()
        with pytest.raises(KeyboardInterrupt):
            press()


def test_a_signal_within_the_reaction_to_another_counts_as_a_second_one(now):
    heard = []

    def react(number: int) -> bool:
        heard.append(number)
        if len(heard) == 1:
            signal.raise_signal(signal.SIGINT)  # its handler runs here, in the middle of the first one's
        return True

    with interruptible(react), deferred():
        with pytest.raises(KeyboardInterrupt):
            press(signal.SIGTERM)
        assert end_at_once()


def test_the_flag_is_seen_in_other_threads_but_ends_the_loops_of_the_main_thread_alone(now):
    with interruptible(), deferred(), ThreadPoolExecutor() as threads:
        assert not threads.submit(end_requested).result()
        press(signal.SIGTERM)
        assert threads.submit(end_requested).result()
        threads.submit(look).result()  # raises nothing: the main thread cancels what others do
        with pytest.raises(KeyboardInterrupt):
            look()


LANDING = """\
import importlib, signal, sys
class Signals:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
def land(*_):
    where = {where!r}
    if where == "destructor":
        Signals()
    elif where == "import":
        importlib.import_module("wants_optional")
    else:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:
            pass
signal.signal(signal.SIGUSR2, land)  # it runs in the main thread, wherever that is
from harness.cli import main
sys.exit(main({arguments!r}))
"""


@pytest.mark.parametrize("where", ["destructor", *slow("import", "except")])
def test_a_signal_that_is_dropped_on_its_way_still_ends_a_run(tmp_path, where):
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    (tmp_path / "optional.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\n")
    (tmp_path / "wants_optional.py").write_text("try:\n    import optional\nexcept BaseException:\n    pass\n")
    arguments = ["run", "exp.yaml", "--launcher", "local", "--out", "out"]
    program = subprocess.Popen(
        [sys.executable, "-c", LANDING.format(where=where, arguments=arguments)],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{PROJECT}{os.pathsep}{tmp_path}"}, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    wait_until(lambda: list((tmp_path / "out" / "trials").glob("*/progress.jsonl")), "no trial has made a step")
    program.send_signal(signal.SIGUSR2)
    try:
        _, said = program.communicate(timeout=120)
    finally:
        program.kill()
    assert "Traceback" not in said, said
    assert "interrupted after 0 of 2 trials; go on with: burst run exp.yaml" in said
    assert program.returncode == 1


def test_ctrl_c_until_the_end_leaves_record_and_report_and_no_traceback(tmp_path):
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    words = "--out out --set steps.measured=50000"
    command = [sys.executable, "-m", "harness", "run", "exp.yaml", *words.split()]
    program = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(PROJECT)}, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    trials = tmp_path / "out" / "trials"
    wait_until(lambda: list(trials.glob("*/progress.jsonl")), "no trial has made a step")
    # As a terminal does: the whole foreground group, again and again.
    wait_until(lambda: program.poll() is not None or os.killpg(program.pid, signal.SIGINT), "the run has not ended")
    _, said = program.communicate(timeout=AMPLE)
    assert "Traceback" not in said, said
    assert f"go on with: burst run exp.yaml {words} --resume" in said
    assert program.returncode == 1
    with open(tmp_path / "out" / "results.csv", newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["interrupted"]
    assert (tmp_path / "out" / "report.html").exists()
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if str(trials).encode() in command]


def test_a_command_under_nohup_does_not_heed_a_closed_terminal() -> None:
    program = (
        "import signal, sys; from harness.cli import main\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "sys.argv = ['burst', 'plan', 'experiments/quickstart.yaml']\n"
        "main()\n"
        "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "True"


def test_ctrl_c_while_the_report_is_drawn_names_the_command_that_draws_it(undone, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("exp.yaml").write_text(EXPERIMENT)
    monkeypatch.setattr("harness.report.page.write_report_of", lambda *_: press())
    short = ["--set", "steps.measured=1", "--set", "sweep.cp_size=[1]"]
    assert main(["run", "exp.yaml", "--launcher", "local", "--out", "out", *short]) == 1
    said = capsys.readouterr().err
    assert said.endswith(
        "burst: interrupted while the report was drawn; all records are kept, and it is drawn by: burst report out\n"
    )
    monkeypatch.undo()  # and no block is in force, as in a new process
    assert main(["report", str(tmp_path / "out"), "--format", "csv"]) == 0
