"""The worker as a launcher sees it: real processes, a trial directory, files left behind, exit codes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.burst import METHOD
from engine.distributed import arrange, check_world_size, limit_threads
from engine.measurement import Measurement, read_measurement
from engine.settings import Steps, TrialSettings, to_json
from engine.shape import ModelShape
from engine.tasks.task import Refused
from engine.worker import TASKS, PhaseTimer, error_kind, measure, write_error
from tests.patience import AMPLE
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)


def settings_of(**changes: Any) -> TrialSettings:
    fields: dict[str, Any] = {
        "task": "train",
        "method": "burst",
        "model": SHAPE,
        "seq_len": 64,
        "dtype": "fp32",
        "learning_rate": 1e-2,
        "steps": Steps(warmup=1, measured=3),
    }
    return TrialSettings(**{**fields, **changes})


def run_worker(trial_dir: Path, settings: TrialSettings, ranks: int = 1, method: str = "engine.burst") -> list[int]:
    """Exit codes of the ranks, started as torchrun would."""
    processes = start_workers(trial_dir, settings, ranks, method)
    for process in processes:
        process.communicate(timeout=AMPLE)
    return [process.returncode for process in processes]


def start_workers(
    trial_dir: Path,
    settings: TrialSettings,
    ranks: int = 1,
    method: str = "engine.burst",
    program: tuple[str, ...] = ("-m", "engine.worker"),
) -> list[subprocess.Popen[str]]:
    """The ranks' processes, what they print on stdout piped."""
    trial_dir.mkdir(exist_ok=True)
    trial = {"settings": to_json(settings), "method": method}
    (trial_dir / "trial.json").write_text(json.dumps(trial))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        **os.environ,
        "BURST_CACHE": str(trial_dir.parent / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    return [
        subprocess.Popen(
            [sys.executable, *program, str(trial_dir)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]


def errors_of(trial_dir: Path) -> dict[str, dict[str, str]]:
    return {path.stem: json.loads(path.read_text()) for path in (trial_dir / "errors").glob("*.json")}


# As `python -m engine.worker`, but that whoever shuts the interpreter down says so.
WATCHED = (
    "import atexit, sys; atexit.register(print, 'shut down', flush=True);"
    "from engine.worker import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Measurement]:
    """A finished two-rank training trial.

    No rank shuts its interpreter down: a thread of gloo that drops a tensor in the middle of that aborts the process,
    whose figures are then lost.
    """
    trial_dir = tmp_path_factory.mktemp("run") / "trial"
    ranks = start_workers(trial_dir, settings_of(cp_size=2), ranks=2, program=("-c", WATCHED))
    printed = [rank.communicate(timeout=AMPLE)[0] for rank in ranks]
    assert [(rank.returncode, "shut down" in said) for rank, said in zip(ranks, printed, strict=True)] == [
        (0, False)
    ] * 2
    return trial_dir, read_measurement(trial_dir)


def attention_alone(folder: str) -> None:
    settings = settings_of(task="attention", cp_size=2)
    world = arrange(settings, torch.device("cpu"))
    measure(TASKS["attention"](settings, METHOD, world), None, Path(folder), world.rank, PhaseTimer(shown=False))


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    """The same trial's attention, timed alone."""
    folder = tmp_path_factory.mktemp("timed")
    run_on_ranks(2, attention_alone, str(folder))
    return read_measurement(folder)


def test_a_trained_trial_leaves_every_raw_figure(trained: tuple[Path, Measurement]) -> None:
    _, measurement = trained
    assert len(measurement.step_seconds) == len(measurement.forward_seconds) == 3
    assert all(0 < f < s for f, s in zip(measurement.forward_seconds, measurement.step_seconds, strict=True))
    assert len(measurement.loss) == len(measurement.grad_norm) == 4
    assert len(measurement.peak_rss_bytes) == 2
    assert min(measurement.peak_rss_bytes) > 1 << 26
    assert measurement.peak_allocated_bytes == measurement.peak_reserved_bytes == []
    assert measurement.device == "cpu"
    assert measurement.chosen["layout"] == "zigzag"
    assert measurement.chosen["kernel"] == "cpu"
    assert measurement.software["torch"] == torch.__version__
    assert measurement.data["origin"] == "pydoc_data.topics"


def test_the_loss_falls_on_real_text(trained: tuple[Path, Measurement]) -> None:
    loss = trained[1].loss
    assert loss[0] == pytest.approx(torch.tensor(256.0).log().item(), rel=0.02)
    assert loss[-1] < loss[0] - 0.1


def test_bytes_sent_are_those_of_one_step(trained: tuple[Path, Measurement], timed: Measurement) -> None:
    # One layer whose attention is saved: recomputation sends nothing, so a step sends what one call alone sends.
    assert trained[1].sent_bytes == timed.sent_bytes
    assert min(timed.sent_bytes) > 0
    assert timed.extra["computed_sent_bytes"] == timed.sent_bytes


def test_every_step_is_one_progress_line(trained: tuple[Path, Measurement]) -> None:
    trial_dir, measurement = trained
    lines = [json.loads(line) for line in (trial_dir / "progress.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "phase" not in line]  # of steps that take long on a busy machine
    assert [(line["step"], line["of"]) for line in lines] == [(step, 4) for step in range(5)]  # 0: it has started
    assert [line["loss"] for line in lines[1:]] == measurement.loss


def test_attention_is_timed_alone_and_compared_with_float64(timed: Measurement) -> None:
    assert len(timed.step_seconds) == len(timed.forward_seconds) == 3
    assert timed.loss == timed.grad_norm == []
    assert timed.chosen["layout"] == "zigzag"
    assert set(timed.extra["error"]) == {"out", "dq", "dk", "dv"}
    assert all(0 < error < 1e-6 for error in timed.extra["error"].values())


def test_an_impossible_trial_is_refused_by_every_rank(tmp_path: Path) -> None:
    # The kernel learns dtype and device at its first call: still a refusal.
    assert run_worker(tmp_path / "trial", settings_of(kernel="fa2", cp_size=2), ranks=2) == [1, 1]
    errors = errors_of(tmp_path / "trial")
    assert set(errors) == {"rank0", "rank1"}
    refused = [error for error in errors.values() if error["kind"] == "refused"]
    assert refused
    for error in refused:
        assert "fa2" in error["reason"]
        assert "Traceback" in error["traceback"]
    # On a busy machine a rank may look for its peers after the first has refused and left.
    lost = [error["reason"] for error in errors.values() if error not in refused]
    assert all(re.search("(?i)connect|peer|store|closed", reason) for reason in lost), lost
    assert not (tmp_path / "trial" / "measurement.json").exists()


def test_memory_that_is_not_there_is_reported_as_oom(tmp_path: Path) -> None:
    huge = ModelShape(name="huge", layers=1, hidden=1 << 22, ffn=8, heads=1, kv_heads=1, head_dim=2, vocab=1 << 26)
    assert run_worker(tmp_path / "trial", settings_of(model=huge)) == [1]
    error = errors_of(tmp_path / "trial")["rank0"]
    assert error["kind"] == "oom"
    assert "\n" not in error["reason"]


def test_errors_are_sorted_into_their_kinds() -> None:
    kinds = {
        error_kind(error)
        for error in (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            MemoryError(),
            RuntimeError("NCCL error: Failed to CUDA calloc, out of memory"),
        )
    }
    assert kinds == {"oom"}
    assert error_kind(Refused("8 heads do not divide by 3; choose 2 or 4")) == "refused"
    assert error_kind(ValueError("a bug inside a step")) == "failed"
    assert error_kind(RuntimeError("Connection closed by peer")) == "failed"


def test_a_report_has_one_sentence_and_the_whole_traceback(tmp_path: Path) -> None:
    try:
        raise KeyError("first line\nsecond line")
    except KeyError as error:
        write_error(tmp_path, 3, error)
    report = errors_of(tmp_path)["rank3"]
    assert report["kind"] == "failed"
    assert report["reason"].startswith("KeyError: ")
    assert "\n" not in report["reason"]
    assert "test_a_report_has_one_sentence" in report["traceback"]


def test_a_long_message_is_cut_at_a_sentence(tmp_path: Path) -> None:
    message = "CUDA out of memory. Tried to allocate 32.00 GiB. GPU 0 has " + "a lot to say about itself " * 20
    write_error(tmp_path, 0, torch.OutOfMemoryError(message))
    report = errors_of(tmp_path)["rank0"]
    assert report["reason"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 GiB."
    assert message in report["traceback"]


@pytest.mark.parametrize(
    ("launched", "changes", "sentence"),
    [
        (2, {"cp_size": 4}, "the trial has world_size 4, but 2 ranks were launched"),
        (3, {"tp_size": 2, "world_size": 3}, "world_size 3 is not a multiple of cp_size x tp_size, 2"),
        (3, {"cp_size": 2, "world_size": 3}, "world_size 3 is not a multiple of cp_size x tp_size, 2"),
    ],
)
def test_ranks_that_do_not_fit_the_trial_are_refused(monkeypatch, launched, changes, sentence) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(launched))
    with pytest.raises(ValueError, match=sentence):
        check_world_size(settings_of(**changes))


def test_ranks_share_the_cores_unless_the_user_says_how_many_threads(monkeypatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    limit_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    limit_threads()
    assert counts == [2]


def test_importing_the_worker_starts_nothing() -> None:
    program = """
import os, sys, threading, torch
threads = len(os.listdir("/proc/self/task"))
import engine.worker
print(len(os.listdir("/proc/self/task")) - threads, threading.active_count(), torch.cuda.is_initialized(),
      torch.distributed.is_initialized(), any(name.split(".")[0] in ("ray", "paramiko") for name in sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "1", "False", "False", "False"]
