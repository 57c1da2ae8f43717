"""Trials of foreign programs, from the launcher to the record: a small program of the tests, and DeepSpeed itself where
it is installed."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from baselines.install.places import Installation, InstallPlace
from baselines.ring_flash_attn import RingFlashAttention
from cluster.files.progress import Progress
from engine.measurement import GpuState, write_json
from engine.memory.gpu_state import digest_of
from engine.reader import to_json
from engine.settings import Checkpoint, Steps, TrialSettings
from engine.shape import ModelShape
from harness.launch.supervisor import LocalLauncher, Patience, Supervisor
from harness.machine.this_machine import Machine
from harness.plan.unsupported import unsupported_reason
from harness.records.record import Record
from harness.records.stored import read_records
from harness.run.attempt import RunContext
from harness.run.execution import run_experiment
from harness.run.progress import PlainView
from harness.spec.trial import Trial
from tests.baselines import installed_elsewhere, some_system
from tests.baselines.installing import installed
from tests.slow import slow

SHAPE = ModelShape(name="small", layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
HERE = Machine(hostname="here", device="cpu", cores=2, memory_gib=8.0)


@pytest.fixture(scope="module")
def systems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("systems")


@pytest.fixture(scope="module")
def launcher(systems: Path) -> Iterator[LocalLauncher]:
    given = {**os.environ, **ENVIRONMENT, "SOME_SYSTEMS": str(systems)}
    launcher = LocalLauncher(Supervisor(given, patience=Patience(failure=1.5, terminate=0.5, poll=0.02)))
    yield launcher
    launcher.close()


def settings(method: str, **changes: Any) -> TrialSettings:
    values = {"task": "attention", "model": SHAPE, "seq_len": 64, "cp_size": 2, "steps": Steps(warmup=1, measured=2)}
    return TrialSettings(method=method, **values | changes)


def record_of(
    launcher: LocalLauncher, run_dir: Path, trial: TrialSettings, environment: Mapping[str, str] = ENVIRONMENT
) -> tuple[Record, Path]:
    """The trial's record and directory, after a run of it alone."""
    alone = Trial(experiment="exp", title="E", settings=trial, deadline_seconds=240)
    host = RunContext(machine=HERE, launcher=launcher, environment=dict(environment), commit="abc")
    run_experiment("exp", [alone], host, run_dir, view=PlainView(Progress("", out=lambda _: None)), say=lambda _: None)
    [record] = read_records(run_dir)
    return record, run_dir / "trials" / alone.id


@pytest.fixture
def some(systems: Path, monkeypatch: pytest.MonkeyPatch) -> InstallPlace:
    """An installation of the tests' system: this Python."""
    monkeypatch.setenv("SOME_SYSTEMS", str(systems))
    monkeypatch.setattr("harness.run.attempt.method_module", lambda _: some_system.__name__)
    monkeypatch.setattr("harness.run.attempt.method_named", lambda _: some_system.METHOD)
    pin = {
        "system": "Some", "licence": "MIT", "home": "https://example.invalid",
        "current": {
            "python": "3.10-3.99", "torch": "2.0-2.99", "cuda": "12.0-13.9", "devices": ["cpu"],
            "packages": {"some==1": "0" * 64},
        },
    }  # fmt: skip
    (systems / "some").mkdir(exist_ok=True)
    (systems / "some" / "pin.yaml").write_text(yaml.safe_dump(pin))
    [place] = some_system.METHOD.places
    place.python.parent.mkdir(parents=True, exist_ok=True)
    place.python.unlink(missing_ok=True)
    place.python.symlink_to(sys.executable)
    state = Installation(pin=place.pinned.digest, python="3.11.7", torch="2.13.0", cuda="", packages={"some": "1"})
    write_json(place.folder / "installed.json", to_json(state))
    return place


def test_a_foreign_program_runs_as_ranks_of_the_launcher(
    some: InstallPlace, launcher: LocalLauncher, tmp_path: Path
) -> None:
    record, folder = record_of(launcher, tmp_path / "run", settings("some_upstream"))
    assert (record.status, record.reason) == ("ok", "")
    assert record.measurement is not None
    assert record.measurement.step_seconds == [1.5, 2.5]  # after one of warm-up
    assert record.measurement.forward_seconds == [0.25, 0.25]
    assert record.measurement.chosen == {"kernel": "unknown (Some does not say)"}
    assert (record.measurement.device, record.measurement.gpus) == ("cpu", [])
    assert record.measurement.gpus_before == record.measurement.gpus_after == []
    less, more = record.measurement.peak_rss_bytes  # the second rank's program holds 800 MB
    assert 0 < less < 800e6 < more < 2e9
    for rank in (0, 1):
        said = (folder / "logs" / f"rank{rank}.log").read_text()
        assert f"rank {rank} of 2 PYTHONPATH None\n" in said
        assert "waits at 127.0.0.1 True set\n" in said
    upstream = record.measurement.extra["upstream"]
    assert upstream["pin"] == some.pinned.digest
    assert upstream["command"] == ["UPSTREAM/env/bin/python", "-u", "TRIAL_DIR/some.py", "0", "3"]
    lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    assert [(line["step"], line["of"]) for line in lines] == [(1, 3), (2, 3), (3, 3)]


# Three GPUs, each idle when it is first asked for and busy from then on.
NVIDIA_SMI = """#!/bin/sh
case "$*" in
*index*) for gpu in 0 1 2; do echo "$gpu, GPU-${gpu}abc, {model}, 143771"; done ;;
*) if mkdir "$0.$1" 2>/dev/null
   then echo "345, 2619, 68.79, 33, 580.159.04, 0x0000000000000001"
   else echo "1605, 2619, 699.42, 71, 580.159.04, 0x0000000000000004"
   fi ;;
esac
"""
IDLE = GpuState(sm_mhz=345, memory_mhz=2619, power_watts=68.79, temperature_c=33, throttle=["gpu_idle"])
BUSY = GpuState(sm_mhz=1605, memory_mhz=2619, power_watts=699.42, temperature_c=71, throttle=["sw_power_cap"])


@pytest.mark.parametrize(
    ("model", "digests", "before", "after"),
    [
        ("NVIDIA H200", [digest_of("GPU-2abc"), digest_of("GPU-0abc")], IDLE, BUSY),
        # CUDA may number those in another order.
        *slow(("GPU model $gpu", ["", ""], GpuState(), GpuState())),
    ],
)
def test_the_record_of_a_foreign_program_has_each_ranks_gpu_and_its_states(
    some: InstallPlace, systems: Path, tmp_path: Path, model: str, digests: list[str], before: GpuState, after: GpuState
) -> None:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI.replace("{model}", model))
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "2,0"}
    given = {**os.environ, **environment, "SOME_SYSTEMS": str(systems), "PATH": path}
    launcher = LocalLauncher(Supervisor(given))
    try:
        record, _ = record_of(launcher, tmp_path / "run", settings("some_upstream"), environment)
    finally:
        launcher.close()
    assert (record.status, record.reason) == ("ok", "")
    assert record.measurement is not None
    assert record.measurement.gpus == digests
    assert record.measurement.gpus_before == [before, before]
    assert record.measurement.gpus_after == [after, after]
    assert record.measurement.device == model.replace("$gpu", "2")
    assert record.measurement.software.get("driver") == ("580.159.04" if digests[0] else None)


def test_a_program_that_stays_after_its_last_step_is_ended_and_its_record_says_so(
    some: InstallPlace, launcher: LocalLauncher, tmp_path: Path
) -> None:
    record, _ = record_of(launcher, tmp_path / "run", settings("some_upstream", seed=some_system.STAYS))
    assert (record.status, record.reason) == ("ok", "")
    assert record.measurement is not None
    assert record.measurement.step_seconds == [1.5, 2.5]
    assert record.measurement.extra["upstream"]["ended"] == "was ended 1 s after its last step"


@pytest.mark.parametrize(
    ("seed", "status", "expected"),
    [
        (some_system.OUT_OF_MEMORY, "oom", "CUDA out of memory. Tried to allocate 1 GiB"),
        (some_system.KILLED, "failed", "rank 1 was killed"),
        (some_system.FEW_STEPS, "failed", "Some printed 1 steps, expected 3"),
        *slow((some_system.RAISES, "failed", "RuntimeError: as planned")),
    ],
)
def test_how_a_foreign_program_ends_is_what_its_record_says(
    some: InstallPlace, launcher: LocalLauncher, tmp_path: Path, seed: int, status: str, expected: str
) -> None:
    record, _ = record_of(launcher, tmp_path / "run", settings("some_upstream", seed=seed))
    assert record.status == status
    assert expected in record.reason
    assert record.measurement is None


@pytest.mark.slow
def test_a_ring_over_flash_attn_runs_on_cpu_ranks_with_the_stand_in(
    launcher: LocalLauncher, systems: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = installed("ring_flash_attn", systems, fetch=True)
    if not place.stand_ins:
        pytest.skip("ring-flash-attention has a real flash_attn here, which needs a GPU")
    monkeypatch.setenv("SOME_SYSTEMS", str(systems))
    monkeypatch.setattr("harness.run.attempt.method_module", lambda _: RingFlashAttention.__module__)
    monkeypatch.setattr("harness.run.attempt.method_named", lambda _: installed_elsewhere.METHOD)
    trial = settings("ring_flash_attn_upstream", dtype="bf16")
    assert installed_elsewhere.METHOD.refuse(trial) is None
    assert installed_elsewhere.METHOD.unavailable("cpu") is None
    assert "stand-in for flash_attn, which runs on CPU ranks alone" in str(
        installed_elsewhere.METHOD.unavailable("cuda")
    )
    for seq_len in (64, 128):
        record, folder = record_of(launcher, tmp_path / f"run{seq_len}", replace(trial, seq_len=seq_len))
        assert record.status == "ok", record.reason + (folder / "logs" / "rank0.log").read_text()
        assert record.measurement is not None
        assert len(record.measurement.step_seconds) == len(record.measurement.forward_seconds) == 2
        assert max(record.measurement.extra["error"].values()) < 1e-2  # out, dq, dk, dv against float64
        assert record.measurement.chosen == {
            "kernel": "stand-in", "layout": "zigzag", "schedule": "ring", "arrangement": "zigzag ring",
        }  # fmt: skip
        assert record.measurement.software["ring-flash-attn"] == "0.1.8"
        upstream = record.measurement.extra["upstream"]
        assert upstream["pin"] == place.pinned.digest
        assert upstream["environment"]["PYTHONPATH"] == "UPSTREAM/ours:BASELINES/stand_ins/flash_attn"


def test_a_system_that_fails_is_one_failed_trial_with_its_error(
    launcher: LocalLauncher, systems: Path, tmp_path: Path
) -> None:
    installed("yunchang", systems)  # skips where it is not
    fails, works = (settings("yunchang_upstream", schedule=schedule) for schedule in ("ulysses", "ring"))
    record, _ = record_of(launcher, tmp_path / "fails", fails)
    assert (record.status, record.measurement) == ("failed", None)  # gloo sends nothing to the rank itself
    assert "RuntimeError" in record.reason
    record, folder = record_of(launcher, tmp_path / "works", works)
    assert record.status == "ok", record.reason + (folder / "logs" / "rank0.log").read_text()


def needs_deepspeed(trial: TrialSettings) -> None:
    """Skip where a plan would refuse the trial because DeepSpeed is missing; another refusal is a failure."""
    condition, sentence = InstallPlace(system="deepspeed", flavour="current").condition()
    if condition != "installed":
        pytest.skip(f"DeepSpeed is {condition}; {sentence}")
    assert unsupported_reason(trial, HERE) is None


@pytest.mark.slow  # where DeepSpeed is installed its imports take ten seconds
def test_deepspeeds_own_attention_runs_on_two_ranks(launcher: LocalLauncher, tmp_path: Path) -> None:
    trial = settings("deepspeed_upstream", dtype="fp32")
    needs_deepspeed(trial)
    record, folder = record_of(launcher, tmp_path / "run", trial)
    assert record.status == "ok", record.reason + (folder / "logs" / "rank0.log").read_text()
    assert record.measurement is not None
    assert len(record.measurement.step_seconds) == len(record.measurement.forward_seconds) == 2
    assert min(record.measurement.step_seconds) > 0
    assert record.measurement.software["deepspeed"] == "0.19.8"


@pytest.mark.slow  # a model of transformers under ZeRO-3 takes half a minute to be imported and made
@pytest.mark.parametrize(("ranks", "inputs"), [(2, "default"), (2, "offload"), (4, "default")])
def test_deepspeed_trains_with_its_own_sequence_parallelism(
    launcher: LocalLauncher, tmp_path: Path, ranks: int, inputs: str
) -> None:
    trial = settings(
        "deepspeed_upstream",
        task="train",
        dtype="bf16",
        cp_size=ranks,
        checkpoint=Checkpoint(every=1, tail=0, upstream=inputs),
        learning_rate=1e-3,
        mlp_tiles=2,
    )
    needs_deepspeed(trial)
    record, folder = record_of(launcher, tmp_path / "run", trial)
    assert record.status == "ok", record.reason + (folder / "logs" / "rank0.log").read_text()
    assert record.measurement is not None
    assert len(record.measurement.step_seconds) == 2
    assert record.measurement.loss[0] == pytest.approx(math.log(SHAPE.vocab), rel=0.05)  # of random weights
