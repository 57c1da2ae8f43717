"""Records of trials that were never run, built through the real dataclasses, for tests of what reads records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.measurement import Measurement
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from harness.records.record import Record, Round, Status, write_record
from harness.report.tables.particular import HEADERS
from harness.run.directory import RunDirectory
from harness.spec.trial import Trial

GIB = 1 << 30
H200 = "NVIDIA H200"
SMALL = ModelShape(name="small", layers=2, hidden=128, ffn=256, heads=8, kv_heads=4, head_dim=16, vocab=256)
LARGE = ModelShape(name="1b", layers=16, hidden=2048, ffn=8192, heads=16, kv_heads=8, head_dim=128, vocab=32000)


def settings(**changes: Any) -> TrialSettings:
    """A small CPU training trial, with `changes`."""
    values: dict[str, Any] = {"task": "train", "method": "burst", "model": SMALL, "seq_len": 1024, "dtype": "fp32"}
    return TrialSettings(**{**values, **changes})


def measurement(of: TrialSettings, *, seconds: float = 0.2, drift: float = 0.0, gpu: str = "") -> Measurement:
    """A plausible measurement: losses fall and differ by the relative `drift`; a GPU adds memory figures."""
    ranks, train = of.world_size, of.task == "train"
    steps = of.steps.warmup + of.steps.measured
    losses = [5.5 * 0.9**step * (1 + drift) for step in range(steps)]
    return Measurement(
        step_seconds=[seconds * (1 + 0.04 * step) for step in range(of.steps.measured)],
        forward_seconds=[seconds * 0.3] * of.steps.measured,
        loss=losses if train else [],
        grad_norm=[loss / 4 for loss in losses] if train else [],
        peak_allocated_bytes=[(20 + rank) * GIB // of.cp_size for rank in range(ranks)] if gpu else [],
        peak_reserved_bytes=[(24 + rank) * GIB // of.cp_size for rank in range(ranks)] if gpu else [],
        peak_rss_bytes=[GIB // 2 + rank * (1 << 20) for rank in range(ranks)],
        sent_bytes=[(of.cp_size - 1) * of.seq_len * 2048 + rank for rank in range(ranks)],
        chosen={"kernel": of.kernel if of.kernel != "auto" else "fa4" if gpu else "cpu", "layout": "zigzag"},
        device=gpu or "cpu",
        software={"python": "3.12.3", "torch": "2.11.0+cu130" if gpu else "2.13.0+cpu"},
        extra={} if train or gpu else {"error": {"out": 2e-7, "dq": 3e-7, "dk": 3e-7, "dv": 2e-7}},
        data={"origin": "Python language reference", "tokenizer": "bytes"} if train else {},
    )


def record(
    *,
    status: Status = "ok",
    reason: str = "",
    experiment: str = "quickstart",
    title: str = "A small sweep",
    seconds: float = 0.2,
    drift: float = 0.0,
    gpu: str = "",
    rounds: Sequence[Sequence[float]] = (),
    **changes: Any,
) -> Record:
    """One record; `changes` go to the settings. Only an ok trial holds a measurement: with `rounds`, the step seconds
    of each, where an empty one gave no figure."""
    of = settings(**changes)
    trial = Trial(experiment=experiment, title=title, settings=of, deadline_seconds=60.0)
    ok = status == "ok"
    measured = measurement(of, seconds=seconds, drift=drift, gpu=gpu) if ok else None
    if measured and rounds:
        measured.step_seconds = [step for steps in rounds for step in steps]
    return Record(
        trial_id=trial.id,
        experiment=experiment,
        title=title,
        settings=of,
        system=of.method,
        status=status,
        reason=reason or ("" if ok else f"a synthetic reason for {status}"),
        measurement=measured,
        launcher="local",
        hosts=[] if status == "refused" else ["node0"],
        gpu=gpu or "cpu",
        commit="0123abc",
        started_at="2026-01-02T03:04:05Z",
        wall_seconds=4.2,
        rounds=[
            Round(
                number=number, place=1, started_at=f"2026-01-02T0{number}:04:05Z", wall_seconds=4.2,
                step_seconds=list(steps), status="ok" if steps else "timeout",
            )
            for number, steps in enumerate(rounds, start=1)
        ],
    )  # fmt: skip


def leave_record(directory: RunDirectory, trial: Trial) -> None:
    """What a planned trial leaves that ended well."""
    settings = trial.settings
    measured = measurement(settings, seconds=0.001 * (1 + settings.seed % 7))
    left = replace(
        record(), trial_id=trial.id, experiment=trial.experiment, settings=settings, measurement=measured
    )  # fmt: skip
    write_record(directory.trial(trial.id), left)


def around(seconds: float, rounds: int = 3, steps: int = 3) -> list[list[float]]:
    """Rounds of steps whose median is about `seconds`: rounds differ by 1%, steps by half of that."""
    return [
        [seconds * (1 + 0.01 * (number % 3 - 1) + 0.005 * (step % 3 - 1)) for step in range(steps)]
        for number in range(rounds)
    ]


def cpu_sweep() -> list[Record]:
    """Quickstart's shape: two tasks, three methods, two lengths, CP 1, 2 and 4, with one trial of each kind of end."""
    speed = {"burst": 1.0, "megatron_cp": 1.2, "ulysses": 1.35}
    ends: dict[tuple[str, str, int, int], tuple[Status, str]] = {
        ("train", "ulysses", 1024, 4): (
            "refused",
            "4 KV heads do not split into 8 ranks; choose a cp_size that divides them",
        ),
        ("train", "megatron_cp", 2048, 4): ("oom", "rank 2 ran out of memory allocating 3.1 GiB"),
        ("attention", "burst", 2048, 2): ("timeout", "no end after 60 s; raise limits.trial_seconds"),
    }
    sweep = []
    for task in ("train", "attention"):
        for seq_len in (1024, 2048):
            for cp_size in (1, 2, 4):
                for index, (method, factor) in enumerate(speed.items()):
                    status, reason = ends.get((task, method, seq_len, cp_size), ("ok", ""))
                    seconds = 0.1 * factor * (seq_len / 1024) ** 1.3 / cp_size**0.6
                    drift = 2e-7 * index * (cp_size - 0.5)
                    sweep.append(
                        record(
                            task=task, method=method, seq_len=seq_len, cp_size=cp_size, status=status, reason=reason,
                            seconds=seconds, drift=drift,
                        )
                    )  # fmt: skip
    return sweep


def gpu_sweep() -> list[Record]:
    """The GPU scale's shape: 1B model, four lengths, CP 1, 2 and 4, two kernels, bf16."""
    speed = {"burst": 1.0, "megatron_cp": 1.12, "ulysses": 1.05}
    sweep = []
    for task in ("train", "attention"):
        for seq_len in (32768, 65536, 131072, 262144):
            for cp_size in (1, 2, 4):
                for method, factor in speed.items():
                    for kernel, slow in (("fa4", 1.0), ("cudnn", 1.14)):
                        if (cp_size == 1 or kernel == "cudnn") and method != "burst":
                            continue
                        status: Status = "oom" if task == "train" and seq_len // cp_size > 131072 else "ok"
                        scale = seq_len / 32768
                        seconds = (0.8 * scale + 0.35 * scale**2) if task == "train" else 0.0245 * scale**2
                        sweep.append(
                            record(
                                task=task, method=method, seq_len=seq_len, cp_size=cp_size, kernel=kernel,
                                dtype="bf16", model=LARGE, gpu=H200, status=status, experiment="quickstart_gpu",
                                seconds=seconds * factor * slow / cp_size, drift=1e-4 * (factor - 1),
                                title="A small sweep on GPUs",
                            )
                        )  # fmt: skip
    return sweep


def traced(seconds: float = 2.0, **changes: Any) -> Record:
    """A trial whose step was traced: its time in five categories."""
    one = record(gpu=H200, dtype="bf16", seconds=seconds, **changes)
    assert one.measurement is not None
    shares = {"attention_forward": 0.2, "attention_backward": 0.45, "matmul": 0.3, "copies": 0.049, "merge": 0.001}
    parts = {name: seconds * shares.get(name, 0.0) for name in HEADERS}
    profile = {"of": "extra_step", "on": "gpu", "rank": 0, "span_seconds": seconds, "seconds": parts}
    return replace(one, measurement=replace(one.measurement, extra={"profile": profile}))


def with_memory(gib: float, seconds: float, **changes: Any) -> Record:
    """A trial on a GPU with this peak memory and step time."""
    one = record(gpu=H200, dtype="bf16", seconds=seconds, **changes)
    assert one.measurement is not None
    ranks = one.settings.world_size
    return replace(one, measurement=replace(one.measurement, peak_allocated_bytes=[int(gib * GIB)] * ranks))


def levers() -> list[Record]:
    """Memory against time at one length: the tiled MLP is dominated, the other three are on the frontier."""
    return [
        with_memory(20, 1.0),
        with_memory(15, 1.2, checkpoint=Checkpoint(offload="all")),
        with_memory(10, 1.5, optimizer_offload=True),
        with_memory(16, 1.4, mlp_tiles=8),
    ]


def in_rounds(one: Record, *seconds: list[float]) -> Record:
    """The record with these steps, a list for each round."""
    assert one.measurement is not None
    steps = [second for of_round in seconds for second in of_round]
    rounds = [
        Round(number=number, place=0, started_at=one.started_at, wall_seconds=1.0, step_seconds=list(of_round))
        for number, of_round in enumerate(seconds, start=1)
    ]
    return replace(one, rounds=rounds, measurement=replace(one.measurement, step_seconds=steps))
