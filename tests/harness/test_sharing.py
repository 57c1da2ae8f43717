"""Which trials share ranks, and how many ranks are started for them."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from engine.settings import ModelShape, TrialSettings
from harness.launch.launcher import Job, Launcher, Outcome
from harness.machine.this_machine import Machine
from harness.run.attempt import RoundPosition, RunContext, execute
from harness.run.directory import RunDirectory
from harness.run.progress import ProgressView
from harness.run.sharing import Sharing
from harness.spec.trial import Trial

MODEL = ModelShape(name="m", layers=1, hidden=16, ffn=32, heads=4, kv_heads=4, head_dim=8, vocab=32)
GPUS = Machine(
    hostname="here", device="cuda", cores=64, memory_gib=512.0, gpu_name="H200", gpu_count=4, gpu_memory_gib=139.0
)
CPU = Machine(hostname="here", device="cpu", cores=4, memory_gib=8.0)


def trial(ranks: int, share: bool = True, **changes: object) -> Trial:
    fields = {"task": "attention", "method": "burst", "model": MODEL, "seq_len": 64, "cp_size": ranks, **changes}
    settings = TrialSettings(**fields)  # type: ignore[arg-type]
    return Trial(experiment="exp", title="E", settings=settings, deadline_seconds=60, share_ranks=share)


def host(machine: Machine, launcher: object = None, **environment: str) -> RunContext:
    return RunContext(machine=machine, launcher=cast(Launcher, launcher), environment=environment, commit="")


def groups(trials: list[Trial], where: RunContext) -> list[tuple[int, ...]]:
    """World sizes of each group, in the order of the first trials."""
    sharing = Sharing(trials, where)
    found = dict.fromkeys((sharing.group(each), sharing.sizes(each)) for each in trials)
    return [sizes for group, sizes in found if group is not None]


def test_on_cpus_ranks_of_any_number_share_where_their_environment_is_equal() -> None:
    sweep = [trial(ranks) for ranks in (1, 2, 4)]
    assert groups(sweep, host(CPU, OMP_NUM_THREADS="1")) == [(1, 2, 4)]
    assert groups(sweep, host(CPU)) == [(1,), (2,), (4,)]  # each rank has its share of the cores


def test_on_gpus_ranks_of_one_larger_number_share_with_single_ones() -> None:
    """Symmetric memory needs ranks that have met equally often; a single rank meets none."""
    assert groups([trial(1), trial(4)], host(GPUS)) == [(1, 4)]
    assert groups([trial(1), trial(2), trial(4)], host(GPUS)) == [(1, 4), (2,)]
    assert groups([trial(2), trial(1), trial(2, seq_len=128)], host(GPUS)) == [(1, 2)]
    assert groups([trial(1), trial(1, seq_len=128)], host(GPUS)) == [(1,)]
    few_cores = host(replace(GPUS, cores=16))
    assert groups([trial(1), trial(4)], few_cores) == [(1,), (4,)]  # eight threads of 16, and four of 16


def test_what_a_process_cannot_change_and_emulated_nodes_form_groups_of_their_own() -> None:
    where = host(CPU, OMP_NUM_THREADS="1")
    assert groups([trial(1), trial(2, deterministic=True), trial(4, deterministic=True)], where) == [(1,), (2, 4)]
    assert groups([trial(2, emulate_nodes=2), trial(4, emulate_nodes=2), trial(1)], where) == [(2,), (4,), (1,)]
    assert groups([trial(1, share=False), trial(4), replace(trial(2), unsupported_reason="no")], where) == [(4,)]


@pytest.mark.parametrize(("gpus", "started"), [(4, 4), (2, 2), (1, 1)])
def test_no_more_ranks_are_started_than_the_machine_or_its_part_holds(tmp_path, gpus: int, started: int) -> None:
    jobs: list[Job] = []

    class Notes:
        name = "notes"

        def run(self, job: Job, on_progress: object = None) -> Outcome:
            jobs.append(job)
            return Outcome(status="failed", reason="noted", wall_seconds=1.0, hosts=["here"], turn=1, idle_ranks=3)

    position = RoundPosition(round=1, place=1, sharing=(1, 2, 4))
    where = host(replace(GPUS, gpu_count=gpus), Notes())
    record = execute(trial(1), position, None, where, RunDirectory(tmp_path), cast(ProgressView, QuietView()))
    assert (jobs[0].ranks, jobs[0].set_ranks, jobs[0].same_size) == (1, started, False)
    assert (record.ranks_turn, record.idle_ranks) == (1, 3)


class QuietView:
    def step(self, line: dict[str, object]) -> None: ...
