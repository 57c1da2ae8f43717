"""How a training run ends, with a launcher whose outcomes the test decides."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.measurement import write_json
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from engine.training.config import TrainingConfig
from engine.training.files import MetricsWriter
from harness.base.errors import UsageError
from harness.launch.launcher import Job, Outcome
from harness.machine.this_machine import Machine
from harness.metrics.flops import work_of
from harness.metrics.hardware import hardware_for
from harness.training import run
from harness.training.progress import is_training_run, training_next_steps, training_status
from harness.training.run import Start, order_of, train

MODEL = ModelShape(name="m", layers=1, hidden=16, ffn=32, heads=2, kv_heads=2, head_dim=8, vocab=256)
SETTINGS = TrialSettings(
    task="train", method="burst", model=MODEL, seq_len=64, cp_size=2, checkpoint=Checkpoint(every=1, tail=0.0)
)
CONFIG = TrainingConfig(settings=SETTINGS, steps=10)
CPU = Machine(hostname="here", device="cpu", cores=2, memory_gib=8.0)
PORT_TAKEN = "rank 0: DistNetworkError: EADDRINUSE, message: address already in use (see logs/rank0.log)"


class ScriptedLauncher:
    """Ends each job with a given outcome: it implements the protocol, so that outcomes are tested without torch."""

    name = "scripted"

    def __init__(
        self, *ends: tuple[str, str, dict[str, object] | None], saved: int | None = None, lost: tuple[str, ...] = ()
    ) -> None:
        self.ends, self.saved, self.lost = list(ends), saved, lost
        self.jobs: list[Job] = []

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        status, reason, left = self.ends[len(self.jobs)]
        self.jobs.append(job)
        if left is not None:
            write_json(job.trial_dir / "outcome.json", left)
        if self.saved is not None:
            (job.trial_dir.parents[1] / "checkpoints" / f"step-{self.saved:08d}").mkdir(parents=True, exist_ok=True)
        known = {"status": status, "reason": reason, "lost": self.lost}
        return Outcome(**known, wall_seconds=1.0, hosts=["here"])  # type: ignore[arg-type]

    def close(self) -> None:
        pass


def ended(
    run_dir: Path,
    launcher: ScriptedLauncher,
    resume: bool = False,
    config: TrainingConfig = CONFIG,
    machine: Machine = CPU,
) -> tuple[int, list[str]]:
    said: list[str] = []
    start = Start(
        machine=machine,
        launcher=launcher,
        run_dir=run_dir,
        resume=resume,
        commit="abc",
        again=["burst", "train", "a b.yaml"],
    )
    return train(config, start, lambda line: None, said.append), said


def test_a_finished_run_says_nothing_and_leaves_what_it_was(tmp_path: Path) -> None:
    launcher = ScriptedLauncher(("ok", "", {"step": 10, "finished": True}))
    assert ended(tmp_path / "run", launcher) == (0, [])
    facts = json.loads((tmp_path / "run" / "training.json").read_text())
    assert (facts["commit"], facts["config"]["settings"]["seq_len"]) == ("abc", 64)
    [job] = launcher.jobs
    assert (job.ranks, job.grace_seconds) == (2, 300.0)
    order = json.loads((job.trial_dir / "order.json").read_text())
    assert (order["resume"], order["method"], order["peak_tflops"]) == (False, "engine.burst", None)


def test_ranks_that_were_asked_to_stop_leave_a_run_to_go_on_with(tmp_path: Path) -> None:
    launcher = ScriptedLauncher(("ok", "", {"step": 4, "finished": False}), saved=4)
    code, [sentence] = ended(tmp_path / "run", launcher)
    assert code == 1
    assert sentence == ("stopped; the state after step 4 is saved, go on with: burst train 'a b.yaml' --resume")


def test_a_failure_names_its_reason_where_to_look_and_what_is_saved(tmp_path: Path) -> None:
    code, [said] = ended(tmp_path / "run", ScriptedLauncher(("oom", "rank 1: out of memory", None), saved=7))
    assert code == 1
    assert said.startswith("training ended (oom): rank 1: out of memory; see ")
    assert "run/attempts/1; the state after step 7 is saved, go on with: burst train 'a b.yaml' --resume" in said
    code, [said] = ended(tmp_path / "other", ScriptedLauncher(("failed", "rank 0: broke", None)))
    assert (code, said.endswith("; no checkpoint was written, start again with: burst train 'a b.yaml'")) == (1, True)


def test_after_a_lost_host_what_was_planned_for_all_of_them_is_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients in host memory, which no plan of several micro-batches has."""

    def plan(settings: TrialSettings, *_: object) -> tuple[TrialSettings, None]:
        return replace(settings, optimizer_offload=True, gradient_offload=True), None

    monkeypatch.setattr(run, "planned_for", plan)
    config = replace(CONFIG, settings=replace(SETTINGS, cp_size=1, world_size=4))
    launcher = ScriptedLauncher(("failed", "host b is gone", None), saved=7, lost=("b",))
    _, [said] = ended(tmp_path / "run", launcher, config=config, machine=replace(CPU, nodes=2, ranks_per_node=2))
    assert said.endswith("--resume --set world_size=2 --set gradient_accumulation=2")


def test_what_the_ranks_refuse_is_the_users_to_mend(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this run cannot start: the sequences are too long"):
        ended(tmp_path / "run", ScriptedLauncher(("refused", "the sequences are too long", None)))


def test_a_resumed_run_that_is_refused_stays_what_it_was(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended(run, ScriptedLauncher(("ok", "", {"step": 10, "finished": True}), saved=10))
    facts = json.loads((run / "training.json").read_text()) | {"commit": "earlier"}
    write_json(run / "training.json", facts)
    with pytest.raises(UsageError, match="made with other layers"):
        ended(run, ScriptedLauncher(("refused", "made with other layers", None)), resume=True)
    assert json.loads((run / "training.json").read_text()) == facts


def test_a_port_lost_to_another_process_is_tried_once_more(tmp_path: Path) -> None:
    launcher = ScriptedLauncher(("failed", PORT_TAKEN, None), ("ok", "", {"step": 10, "finished": True}))
    assert ended(tmp_path / "run", launcher) == (0, [])
    assert [job.trial_dir.name for job in launcher.jobs] == ["1", "2"]


def test_a_new_start_moves_the_earlier_run_aside_and_a_resumed_one_goes_on_in_it(tmp_path: Path) -> None:
    for resume, attempts in ((False, "1"), (True, "2"), (False, "1")):
        launcher = ScriptedLauncher(("ok", "", {"step": 10, "finished": True}), saved=10)
        _, said = ended(tmp_path / "run", launcher, resume)
        assert launcher.jobs[0].trial_dir.name == attempts
        assert json.loads((launcher.jobs[0].trial_dir / "order.json").read_text())["resume"] is resume
    [moved] = [path for path in tmp_path.iterdir() if path.name != "run"]
    assert said == [f"the earlier run in {tmp_path / 'run'} is now {moved}"]


def test_status_says_how_far_a_run_has_come(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended(run, ScriptedLauncher(("ok", "", {"step": 4, "finished": False})))
    assert is_training_run(run)
    start = "run stopped before its end; no step of 10 yet; no checkpoint yet; started 2"
    assert training_status(run).startswith(start)
    writer = MetricsWriter(run, from_step=0)
    writer.write("step", 4, 256, loss=2.5, seconds=0.25)
    writer.write("evaluation", 3, 192, loss=2.75)
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    assert training_status(run).startswith(
        "run stopped before its end; step 4 of 10, loss 2.5000, 0.25 s per step; evaluation loss 2.7500 after step 3; "
        "saved after step 4; started 2"
    )
    (run / "training.json").write_text("{}")
    with pytest.raises(UsageError, match="does not describe a training run"):
        training_status(run)


@pytest.mark.parametrize(
    ("end", "words", "steps"),
    [
        (("ok", "", {"finished": True}), "has ended", ["write its model for transformers with: burst train export "
                                                       "{run} --out {run}/model"]),
        (("ok", "", {"finished": False}), "stopped before", ["the state after step 4 is saved, go on with: "
                                                             "burst train 'a b.yaml' --out {run} --resume"]),
        (("failed", "broke", None), "broke off before", ["see what its ranks print with: burst status --logs "
                                                         "{run}/attempts/1", "the state after step 4 is saved, go on "
                                                         "with: burst train 'a b.yaml' --out {run} --resume"]),
    ],
)  # fmt: skip
def test_status_says_how_a_run_ended_and_the_next_command(tmp_path: Path, end, words: str, steps: list[str]) -> None:
    run = tmp_path / "run"
    ended(run, ScriptedLauncher(end, saved=4))
    (run / "attempts/1/logs").mkdir()
    (run / "attempts/1/logs/rank0.log").touch()
    assert training_status(run).startswith(f"run {words}")
    assert training_next_steps(run) == [step.format(run=run) for step in steps]


def test_a_training_run_that_was_renamed_goes_on_where_it_is_now(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended(run, ScriptedLauncher(("ok", "", {"step": 4, "finished": False}), saved=4))
    facts = json.loads((run / "training.json").read_text())
    facts["command"] = ["burst", "train", "train.yaml", "--out", str(run)]
    (run / "training.json").write_text(json.dumps(facts))
    moved = run.rename(tmp_path / "moved")
    [step] = training_next_steps(moved)
    assert step.endswith(f"go on with: burst train train.yaml --out {moved} --resume")


def test_status_says_that_a_run_runs_and_where_its_ranks_print(tmp_path: Path) -> None:
    run, seen = tmp_path / "run", []

    class Looking(ScriptedLauncher):
        def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
            (job.trial_dir / "logs").mkdir()
            (job.trial_dir / "logs" / "rank0.log").touch()
            seen.extend([training_status(run), *training_next_steps(run)])
            return super().run(job, on_progress)

    ended(run, Looking(("ok", "", {"step": 10, "finished": True}), saved=10))
    sentence, step = seen
    assert sentence.startswith("run runs; no step of 10 yet")
    assert step == f"see what its ranks print with: burst status --logs {run}/attempts/1"


def test_mfu_counts_the_models_own_work_against_the_gpus_peak_in_bf16_alone(tmp_path: Path) -> None:
    gpu = Machine(
        hostname="here", device="cuda", cores=8, memory_gib=64.0, gpu_name="NVIDIA H200", gpu_count=2,
        gpu_memory_gib=140.0,
    )  # fmt: skip
    order = order_of(CONFIG, gpu, resume=False)
    assert order.peak_tflops == hardware_for("NVIDIA H200").peak_bf16_tflops
    whole = replace(SETTINGS, checkpoint=Checkpoint(every=0))
    assert order.model_flops_per_step == work_of(whole).model
    fp32 = replace(CONFIG, settings=replace(SETTINGS, dtype="fp32"))
    assert order_of(fp32, gpu, resume=False).peak_tflops is None
