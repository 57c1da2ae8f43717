"""`burst train` over hosts of the lab, one of which is lost: started by Ray over SSH, and by torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.training.manifest import checkpoints, damage, read_manifest, step_of
from tests.cluster.lab.test_lab_cluster import ROOT, guests, opened_site
from tests.hosts import lab as lab_module
from tests.hosts.lab import Lab, LabHost, open_lab
from tests.patience import AMPLE, wait_until

if reason := lab_module.unavailable():
    pytest.skip(reason, allow_module_level=True)
pytest.importorskip("ray")

# More steps than any test waits for: the learning rate of a step follows from their number.
CONFIG = """
model: {{layers: 1, hidden: 16, ffn: 24, heads: 2, kv_heads: 2, head_dim: 8, vocab: 256}}
data: {data}
seq_len: 32
cp_size: 2
dtype: fp32
checkpoint: {{every: 0}}
steps: 100000
learning_rate: 0.01
save: {{every: 5}}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration on a text that all hosts see; as many threads everywhere, which decide how sums are rounded."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("BURST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("a line of text to learn from\n" * 400)
    path = tmp_path / "train.yaml"
    path.write_text(CONFIG.format(data=tmp_path / "text.txt"))
    return path


def losses(run: Path) -> dict[int, float]:
    """By step; none of a line that is being written."""
    path = run / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    lines = [json.loads(line) for line in whole.splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def saved(run: Path) -> int:
    """The step of the newest checkpoint that is whole; 0 for none."""
    for path in checkpoints(run / "checkpoints"):
        with contextlib.suppress(ValueError):
            if not damage(path, read_manifest(path).files):
                return step_of(path)
    return 0


def wait_for_save(program: subprocess.Popen[str], run: Path, beyond: int = 0) -> None:
    def made() -> bool:
        assert program.poll() is None, program.communicate()
        return saved(run) > beyond

    wait_until(made, f"no checkpoint after step {beyond} in {run}", seconds=120)


def stopped(program: subprocess.Popen[str]) -> str:
    """What a run says that is interrupted in order."""
    program.send_signal(signal.SIGINT)
    out, error = program.communicate(timeout=AMPLE)
    assert program.returncode == 1, out + error
    return out + error


def next_command(said: str) -> list[str]:
    return shlex.split(said.partition("go on with: ")[2].splitlines()[0])


def uninterrupted(config: Path, run: Path, steps: int) -> dict[int, float]:
    """Losses of the same run on this machine alone, two ranks, over at least so many steps."""
    program = subprocess.Popen(
        [sys.executable, "-m", "harness", "train", str(config), "--out", str(run), "--launcher", "local"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: max(losses(run), default=0) >= steps, f"no {steps} steps", seconds=240)
    stopped(program)
    return losses(run)


def assert_continues(run: Path, truth: dict[int, float], exact_until: int) -> None:
    """The curve has every step once, is the same up to a step, and equal within fp32 rounding behind it."""
    found = losses(run)
    assert list(found) == list(range(1, max(found) + 1))
    common = [step for step in found if step in truth]
    assert [found[step] for step in common if step <= exact_until] == [
        truth[step] for step in common if step <= exact_until
    ]
    assert [found[step] for step in common] == pytest.approx([truth[step] for step in common], rel=1e-3)


@pytest.mark.hosts
def test_a_run_over_hosts_that_share_nothing_loses_two_of_three_and_goes_on_each_time(config: Path, tmp_path: Path):
    (tmp_path / "lab").mkdir()
    with opened_site(3, tmp_path / "lab") as site:
        _, second, third = site.lab.hosts
        run = tmp_path / "run"
        run.mkdir()
        for host in site.lab.hosts:
            site.lab.mount(host, run, "64m")
        code, said = site.up()
        assert code == 0, said

        # The program is killed, and none of what the ranks saved has come here: it is still on their hosts.
        guests_before = guests()
        program = site.start("train", str(config), *site.nodes(), "--out", str(run))
        wait_for_save(program, run)
        program.kill()
        program.communicate()
        wait_until(lambda: not any(map(site.ranks, site.lab.hosts)), "ranks outlived the program that started them")
        wait_until(lambda: guests() <= guests_before, "the guest outlived the program that started it")
        on_hosts = saved(run)
        shutil.rmtree(run / "checkpoints")
        (run / "metrics.jsonl").unlink()

        program = site.start("train", str(config), *site.nodes(), "--out", str(run), "--resume")
        wait_for_save(program, run, beyond=on_hosts + 5)
        site.lab.kill(second)
        out, error = program.communicate(timeout=AMPLE)
        said = out + error
        assert program.returncode == 1, said
        assert "was still on the hosts, from a start that ended before it was fetched" in said
        assert f"{run} is not seen by lab1, lab2: its checkpoints are gathered here as they are saved" in said
        [ending] = [line for line in said.splitlines() if "go on with" in line]
        assert ending.startswith("training ended (node_lost): lab2 was lost ("), said
        assert "the ranks on lab1 were ended" in ending
        assert f"the state after step {saved(run)} is saved" in ending
        assert "--set" not in ending  # the third host takes its place
        at_first = saved(run)

        program = site.start(*next_command(said)[1:])
        wait_for_save(program, run, beyond=at_first)
        site.lab.kill(third)
        out, error = program.communicate(timeout=AMPLE)
        said = out + error
        assert "training ended (node_lost): lab3 was lost (" in said, said
        assert "--resume --set world_size=1 --set cp_size=1" in said
        at_second = saved(run)

        # With the sizes of before it is refused, in one sentence that has those that fit.
        code, refused = site.burst("train", str(config), *site.nodes(), "--out", str(run), "--resume")
        assert code == 2, refused
        assert refused.splitlines()[-1].endswith("; here it goes on with --set world_size=1 --set cp_size=1"), refused
        program = site.start(*next_command(said)[1:])
        wait_for_save(program, run, beyond=at_second)
        said = stopped(program)
        last = max(losses(run))
        assert f"stopped; the state after step {last} is saved" in said
        assert saved(run) == last

        truth = uninterrupted(config, tmp_path / "truth", last)
        assert_continues(run, truth, exact_until=at_second)
        for host in (second, third):
            site.lab.revive(host)
        site.burst("cluster", "down")


@pytest.mark.hosts
def test_the_head_is_lost_and_the_run_goes_on_without_it_from_common_storage(config: Path, tmp_path: Path):
    (tmp_path / "lab").mkdir()
    with opened_site(2, tmp_path / "lab") as site:
        run = tmp_path / "run"
        program = site.start("train", str(config), *site.nodes(), "--out", str(run))  # with a cluster of its own
        wait_for_save(program, run)
        site.lab.kill(site.lab.hosts[0])
        out, error = program.communicate(timeout=AMPLE)
        said = out + error
        assert program.returncode == 1, said
        assert "is not seen by" not in said
        [ending] = [line for line in said.splitlines() if "go on with" in line]
        assert ending.startswith("training ended (node_lost): lab1 was lost ("), said
        at_first = saved(run)

        program = site.start(*next_command(said)[1:])
        wait_for_save(program, run, beyond=at_first)
        assert "left out: lab1: " in stopped(program)
        assert_continues(run, uninterrupted(config, tmp_path / "truth", at_first), exact_until=at_first)
        site.lab.revive(site.lab.hosts[0])
        site.burst("cluster", "down")


class Torchrun:
    """`burst train --torchrun` on hosts of the lab, one rank each; run directories may be apart."""

    def __init__(self, lab: Lab, config: Path) -> None:
        self.lab, self.config = lab, config
        self.programs: list[subprocess.Popen[str]] = []

    def start(self, host: LabHost, words: list[str]) -> subprocess.Popen[str]:
        """`words` are torchrun's arguments and burst's, as a user types them behind `torchrun`."""
        assert host.sshd is not None
        inside = ["nsenter", "-t", str(host.sshd.pid), "-n", "-u", "-m"]
        program = subprocess.Popen(
            [*inside, sys.executable, "-m", "torch.distributed.run", *words],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.programs.append(program)
        return program

    def start_all(self, outs: list[Path], *more: str) -> list[subprocess.Popen[str]]:
        master = self.lab.hosts[0].address
        return [
            self.start(
                host,
                [
                    *("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)),
                    *("--master-addr", master, "--master-port", "29500", "-m", "harness"),
                    *("train", str(self.config), "--torchrun", "--out", str(out), *more),
                ],
            )
            for number, (host, out) in enumerate(zip(self.lab.hosts, outs, strict=True))
        ]

    def close(self) -> None:
        for program in self.programs:
            program.kill()
            program.wait()


@contextlib.contextmanager
def opened_torchrun(folder: Path, config: Path) -> Iterator[Torchrun]:
    folder.mkdir()
    with open_lab(2, folder) as lab, contextlib.closing(Torchrun(lab, config)) as runs:
        yield runs
    assert lab.left_behind() == []


@pytest.mark.hosts
@pytest.mark.parametrize(("lost", "apart"), [(0, True), (1, False)], ids=["first-apart", "second-shared"])
def test_a_host_of_torchrun_is_lost_and_the_other_names_it_and_goes_on(config: Path, tmp_path: Path, lost, apart):
    with opened_torchrun(tmp_path / "lab", config) as runs:
        outs = [tmp_path / "run1", tmp_path / ("run2" if apart else "run1")]
        left = 1 - lost
        programs = runs.start_all(outs)
        wait_for_save(programs[left], outs[left])
        runs.lab.kill(runs.lab.hosts[lost])
        said, _ = programs[left].communicate(timeout=AMPLE)
        assert programs[left].returncode == 1, said
        [ending] = [line for line in said.splitlines() if "go on with" in line]
        assert ending.startswith("training ended (node_lost): lab2 was lost (" if lost else "lab1 was lost ("), said
        at_first = saved(outs[left])
        assert f"the state after step {at_first} is saved, go on with: torchrun --nnodes 1 --nproc-per-node 1" in ending
        assert ending.endswith("--resume --set world_size=1 --set cp_size=1")

        # The host that is left goes on alone; then both do, and the one that was lost has missed that.
        alone = runs.start(runs.lab.hosts[left], next_command(said)[1:])
        wait_for_save(alone, outs[left], beyond=at_first)
        ended = ending_of(alone)
        at_second = saved(outs[left])
        assert f"stopped; the state after step {at_second} is saved, go on with: torchrun --nnodes 1" in ended, ended
        runs.lab.revive(runs.lab.hosts[lost])
        both = runs.start_all(outs, "--resume")
        wait_for_save(both[0], outs[0], beyond=at_second)
        for program in both:
            program.send_signal(signal.SIGTERM)
        assert "stopped; the state after step" in both[0].communicate(timeout=AMPLE)[0]
        both[1].communicate(timeout=AMPLE)
        assert saved(outs[0]) == saved(outs[1]) > at_second

        truth = uninterrupted(config, tmp_path / "truth", at_second)
        if not apart:  # else each host has the metrics of the time when rank 0 was there
            assert_continues(outs[0], truth, exact_until=at_first)
        else:
            found = losses(outs[left])
            assert min(found) == at_first + 1
            assert [found[step] for step in found if step in truth] == pytest.approx(
                [truth[step] for step in found if step in truth], rel=1e-3
            )


@pytest.mark.hosts
def test_hosts_of_torchrun_that_lose_the_link_between_them_both_end_and_go_on_together(config: Path, tmp_path: Path):
    with opened_torchrun(tmp_path / "lab", config) as runs:
        outs = [tmp_path / "run1", tmp_path / "run2"]
        programs = runs.start_all(outs)
        for program, out in zip(programs, outs, strict=True):
            wait_for_save(program, out)
        runs.lab.cut(runs.lab.hosts[1])
        for program, says in zip(programs, ("training ended (node_lost): lab2", "lab1"), strict=True):
            said, _ = program.communicate(timeout=AMPLE)
            assert program.returncode == 1, said
            [ending] = [line for line in said.splitlines() if "go on with" in line]
            assert ending.startswith(f"{says} was lost (no word for 20 s)"), said
        runs.lab.mend(runs.lab.hosts[1])
        last = max(map(saved, outs))
        both = runs.start_all(outs, "--resume")
        for program, out in zip(both, outs, strict=True):
            wait_for_save(program, out, beyond=last)
        for program in both:
            program.send_signal(signal.SIGTERM)
        assert "stopped; the state after step" in both[0].communicate(timeout=AMPLE)[0]
        both[1].communicate(timeout=AMPLE)


def ending_of(program: subprocess.Popen[str]) -> str:
    program.send_signal(signal.SIGTERM)
    return program.communicate(timeout=AMPLE)[0]
