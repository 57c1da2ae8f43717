"""Ctrl-C pressed again and again ends a run once, in order."""

from __future__ import annotations

import atexit
import csv
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import interrupts
from harness.interrupts import PATIENCE_SECONDS, SIGNALS, interrupted_once
from tests.patience import AMPLE, wait_until

PROJECT = Path(__file__).parents[2]
EXPERIMENT = """\
task: train
model: tiny
sweep: {cp_size: [1, 2]}
fixed: {method: burst, seq_len: 128, dtype: fp32}
steps: {warmup: 1, measured: 100000}
limits: {trial_seconds: 3600}
"""


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock to be turned, and the handlers and the end of this process as they were."""
    clock, registered = [1000.0], []
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(atexit, "register", registered.append)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:  # whoever started the tests may ignore some, as nohup does
        signal.signal(number, signal.SIG_DFL)
    yield clock
    for number, handler in handlers.items():
        signal.signal(number, handler)


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


@pytest.mark.parametrize("launcher", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_ctrl_c_until_the_end_leaves_record_and_report_and_no_traceback(tmp_path, launcher):
    if launcher == "ray":
        pytest.importorskip("ray")
    (tmp_path / "exp.yaml").write_text(EXPERIMENT)
    command = [sys.executable, "-m", "harness", "run", "exp.yaml", "--launcher", launcher, "--out", "out"]
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
    assert "go on with: burst run exp.yaml" in said
    assert program.returncode == 1
    with open(tmp_path / "out" / "results.csv", newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["interrupted"]
    assert (tmp_path / "out" / "report.html").exists()


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
