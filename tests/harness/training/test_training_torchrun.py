"""`burst train --torchrun` in real processes: two hosts' worth of ranks on this machine, with a run directory each."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.distributed import HashStore

from engine.training.manifest import checkpoints, damage, read_manifest, step_of
from harness.base.errors import UsageError
from harness.launch import torchrun
from harness.launch.ports import reserve_port
from harness.launch.ray.watch import HostLost
from harness.launch.torchrun import Place, check_hosts, joined, place_of
from tests.harness.training.test_train_command import CONFIG, PROJECT, burst, job_that_ends_soon
from tests.patience import AMPLE, wait_until
from tests.processes import listens_on


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun")
    text = CONFIG.replace("data: store", "data: text.txt").replace("steps: 100000", "steps: 5")
    (folder / "train.yaml").write_text(text + "save: {every: 2}\n")
    (folder / "text.txt").write_text("a line of text to learn from\n" * 1000)
    return folder


def by_torchrun(workplace: Path, *arguments: str, nodes: int = 2) -> tuple[list[int], list[str]]:
    """Exit code and output of torchrun on each host, one rank each; `{node}` in an argument is the host's number."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with reserve_port() as port:
        programs = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", "1"),
                    *("--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)),
                    *("-m", "harness", "train", "train.yaml", "--torchrun"),
                    *(argument.format(node=node) for argument in arguments),
                ],
                cwd=workplace, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for node in range(nodes)
        ]  # fmt: skip
        said = [program.communicate(timeout=AMPLE)[0] for program in programs]
    return [program.returncode for program in programs], said


def begun(run: Path) -> bool:
    """Whether a step is done."""
    metrics = run / "metrics.jsonl"
    return metrics.exists() and '"kind": "step"' in metrics.read_text()


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "step"]


@pytest.fixture(scope="module")
def trained(workplace: Path) -> tuple[list[int], list[str]]:
    return by_torchrun(workplace, "--out", "run{node}")


def test_hosts_with_a_directory_each_train_as_one_machine_does_and_both_keep_the_checkpoint(
    workplace: Path, trained: tuple[list[int], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, (first, second) = trained
    assert codes == [0, 0], first + second
    assert first.count("Trained: run0\n") == 1
    assert "the hosts do not share the run directory: each checkpoint is gathered, whole on " in first
    assert "Trained" not in second
    for run in ("run0", "run1"):
        found = checkpoints(workplace / run / "checkpoints")
        assert [path.name for path in found] == ["step-00000005", "step-00000004"]
        assert not any(damage(path, read_manifest(path).files) for path in found)
        assert json.loads((workplace / run / "training.json").read_text())["config"]["steps"] == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, said = burst(workplace, "train", "train.yaml", "--launcher", "local", "--out", "alone")
    assert code == 0, said
    assert losses(workplace / "run0") == losses(workplace / "alone")


@pytest.mark.slow
def test_a_run_of_torchrun_goes_on_on_fewer_ranks_and_without_torchrun_and_refuses_its_own_sizes_there(
    workplace: Path, trained
) -> None:
    [code], [said] = by_torchrun(workplace, "--out", "run1", "--resume", "--set", "steps=7", nodes=1)
    assert code == 1
    assert (
        "train.yaml has world_size 2, but torchrun started 1 ranks; start as many, or give --set world_size=1" in said
    )
    sizes = ["--set", "world_size=1", "--set", "cp_size=1"]
    [code], [said] = by_torchrun(workplace, "--out", "run1", "--resume", "--set", "steps=7", *sizes, nodes=1)
    assert (code, "Trained: run1\n" in said) == (0, True), said
    assert checkpoints(workplace / "run1" / "checkpoints")[0].name == "step-00000007"

    # The ranks of one way of starting go on from the other's checkpoints, and back.
    resumed = ["--out", "run1", "--resume", *sizes, "--set"]
    code, said = burst(workplace, "train", "train.yaml", "--launcher", "local", *resumed, "steps=9")
    assert code == 0, said
    [code], [said] = by_torchrun(workplace, *resumed, "steps=11", nodes=1)
    assert code == 0, said
    assert [path.name for path in checkpoints(workplace / "run1" / "checkpoints")] == ["step-00000011", "step-00000010"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGUSR1, signal.SIGHUP, None], ids=["slurm", "closed-terminal", "before-the-job-ends"]
)
def test_a_rank_that_another_launcher_started_saves_and_ends_at_its_signal_and_ahead_of_its_job(
    workplace: Path, number: int | None, tmp_path
) -> None:
    run = tmp_path / "run"
    with reserve_port() as port:
        variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        if number is None:
            variables |= job_that_ends_soon(tmp_path)[1]
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": str(PROJECT)}
        arguments = ["--torchrun", "--out", str(run), "--set", "world_size=1", "--set", "cp_size=1"]
        program = subprocess.Popen(
            [
                *(sys.executable, "-m", "harness", "train", "train.yaml", *arguments),
                *("--set", "steps=100000", "--set", "save.every=0"),
            ],
            cwd=workplace, env={**os.environ, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        wait_until(lambda: begun(run) or program.poll() is not None, "no step")
        heard = listens_on(program.pid)
        if number is not None:
            program.send_signal(number)
        said, _ = program.communicate(timeout=AMPLE)
    assert (program.returncode, heard) == (1, {"127.0.0.1"}), said
    assert ("stopping ahead of the end of Slurm's job at " in said) == (number is None), said
    [newest] = checkpoints(run / "checkpoints")
    assert f"stopped; the state after step {step_of(newest)} is saved, go on with: " in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_when_torchrun_is_killed_the_run_is_saved_and_all_processes_of_the_host_end(workplace: Path, tmp_path) -> None:
    run = tmp_path / "run"
    words = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "-m", "harness", "train", "train.yaml"]
    with reserve_port() as port:
        program = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--master-port", str(port), *words),
                *("--torchrun", "--out", str(run), "--set", "steps=100000", "--set", "save.every=0"),
            ],
            cwd=workplace, env={**os.environ, "PYTHONPATH": str(PROJECT)},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        wait_until(lambda: begun(run) or program.poll() is not None, "no step")
        program.kill()
        said, _ = program.communicate(timeout=AMPLE)  # until the last process that writes there has ended
    [newest] = checkpoints(run / "checkpoints")
    assert f"stopped; the state after step {step_of(newest)} is saved, go on with: torchrun --nnodes 1" in said


@pytest.mark.slow
def test_a_refusal_of_one_host_is_said_once_and_ends_both(workplace: Path, trained) -> None:
    for words, arguments in {
        "evaluate.sequences is 99999": ["--set", "evaluate.every=1", "--set", "evaluate.sequences=99999"],
        "there is no checkpoint to resume from": ["--resume"],
    }.items():
        codes, said = by_torchrun(workplace, "--out", "new{node}", *arguments)
        assert codes == [1, 1], said
        assert sum(text.count(f"burst: this run cannot start: {words}") for text in said) == 1, said


def test_options_that_contradict_torchrun_are_refused_in_one_sentence(workplace: Path) -> None:
    for arguments, words in {
        ("--torchrun",): "--torchrun: RANK is not set, as torchrun sets it for the ranks it starts; start torchrun",
        (
            "--torchrun",
            "--launcher",
            "local",
        ): "with --torchrun the ranks run already; leave --nodes, --ray and --launcher out",
        ("--nodes", "hosts", "--launcher", "local"): "--launcher local starts ranks on this machine alone",
    }.items():
        code, said = burst(workplace, "train", "train.yaml", *arguments)
        assert (code, words in said, said.count("\n")) == (2, True, 1), said


def test_a_first_host_that_cannot_be_met_is_one_sentence_with_its_address() -> None:
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as other:  # of another program, which never answers
        port = str(other.getsockname()[1])
        with pytest.raises(UsageError, match=rf"^--torchrun: rank 0 cannot use port {port} of 127\.0\.0\.1 \(.*in use"):
            joined(place_of(variables | {"RANK": "0", "MASTER_PORT": port}), 1.0)
    with pytest.raises(
        UsageError, match=rf"the first host, 127\.0\.0\.1, does not answer at port {port} within 1 s"
    ) as error:
        joined(place_of(variables | {"RANK": "1", "MASTER_PORT": port}), 1.0)
    assert "\n" not in str(error.value)


def test_the_key_of_one_host_is_told_to_nobody_and_that_of_several_needs_their_secret(monkeypatch) -> None:
    """Whoever reaches the store reads it, and the key opens what starts programs."""
    store = HashStore()
    torchrun._agreed_key(store, place(ranks=1))
    assert store.num_keys() == 0
    keys = []
    for secret in ("", "ours", "ours", "theirs"):
        monkeypatch.setenv(torchrun.SHARED_VARIABLE, secret)
        keys.append(torchrun._agreed_key(store, place(rank=min(len(keys), 1), ranks=2)))
    assert keys[1] == keys[2] != keys[0]
    assert len(set(keys)) == 3
    token = bytes.fromhex(store.get("key").decode().split()[0])
    assert token not in keys


def test_a_host_with_another_secret_is_refused_in_one_sentence() -> None:
    torchrun._Manager.register("host", callable=object, exposed=[])
    server = torchrun._Manager(("127.0.0.1", 0), authkey=b"ours").get_server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(HostLost, match=r"gpu01.*another secret; give all hosts the same \$BURST_TORCHRUN_SECRET"):
        torchrun.TorchrunMember("gpu01", server.address, b"theirs")


def place(*, ranks: int, rank: int = 0) -> Place:
    return Place(rank=rank, ranks=ranks, local_rank=0, local_ranks=1, port=1, master="127.0.0.1")


def test_a_host_with_other_software_is_named() -> None:
    newest, older = {"torch": "2.13.0", "code": "abc"}, {"torch": "2.12.0", "code": "abc"}
    check_hosts({"lab1": newest, "lab2": newest})
    with pytest.raises(UsageError, match=r"torch is 2\.13\.0 on 2 of 3 nodes but 2\.12\.0 on lab3; install the same"):
        check_hosts({"lab1": newest, "lab2": newest, "lab3": older})
