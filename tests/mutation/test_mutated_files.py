"""Files of users, damaged in hundreds of ways: what cannot be read is refused in one sentence with its line."""

from __future__ import annotations

import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.files.errors import UsageError
from cluster.inventory.file import load_inventory
from harness.cli import main
from harness.machine.this_machine import Machine
from harness.plan.matrix import plan
from harness.records.stated import PROVENANCE_FILE
from harness.records.stored import EXPERIMENT_FILE
from harness.report.page import write_report
from harness.run.directory import RunDirectory
from harness.spec.experiment import load_experiment
from harness.training.file import load_training
from tests.harness.run.test_run_experiment import ScriptedLauncher
from tests.harness.synthetic_records import leave_record
from tests.harness.verify.test_verify import STATED
from tests.mutation.mutations import damage, mutated
from tests.patience import AMPLE
from tests.slow import slow

ROOT = Path(__file__).parents[2]
_SITE = (ROOT / "experiments/sites/h200x8.yaml").read_text(encoding="utf-8")

INVENTORIES = (
    """\
name: lab
site: SITE
ssh: {user: ops, key: ~/.ssh/id_ed25519, jump: bastion}
exclude: [gpu07]
nodes:
  - gpu[01-08]
  - hosts: old[1-4]
    address: 10.0.0.[11-14]
    gpus: {count: 4, model: A800}
    environment: {NCCL_IB_TC: 106, LD_LIBRARY_PATH: /opt/lib}
overrides:
  gpu03: {network: {interface: eth1}}
""",
    """\
software: {python: /opt/burst/.venv/bin/python, folder: /opt/burst}
container:
  engine: docker
  image: burst:latest
  ipc: private
  extra_arguments: [--shm-size=64g]
  ulimits: {memlock: '-1'}
  mounts:
    - {source: /data, target: /data, read_only: true}
storage:
  shared:
    - {path: /home, min_free_gib: 10}
  servers: [10.0.0.9]
ranks_per_node: 2
ray:
  head_port: 6380
  worker_port_first: 20000
  dashboard: false
nodes: ['gpu[01-04]', root@spare:2222]
""",
    _SITE.partition("name: h200x8\n")[2] + "nodes:\n  - node[1-2]\n",
)
TRAININGS = (
    (ROOT / "examples/train_tiny.yaml").read_text(encoding="utf-8"),
    """\
model: {layers: 2, hidden: 64, ffn: 128, heads: 4, kv_heads: 2, head_dim: 16, vocab: 256}
seq_len: 1k
steps: 10
world_size: 4
cp_size: 2
checkpoint: {tail: 0.5, every: 1, offload: inputs}
mask: sliding_window:64
learning_rate: 1e-3
metrics: {tracker: tensorboard}
gradient_accumulation: 2
lm_head_fusion: true
""",
)
EXPERIMENTS = tuple(path.read_text(encoding="utf-8") for path in sorted((ROOT / "experiments").glob("*.yaml")))
KINDS: dict[str, tuple[Callable[[Path], object], tuple[str, ...], int]] = {
    "experiment": (load_experiment, EXPERIMENTS, 1),
    "training": (load_training, TRAININGS, 2),
    "inventory": (load_inventory, INVENTORIES, 3),
}


# A line of a file with one mistake each, and the sentence after its place.
SENTENCES: dict[str, tuple[str, str, str]] = {
    "a tab": ("training", "save:\n\tevery: 2", "5: found a tab; indent with spaces"),
    "a control character": ("training", "data: a\x1bb", "4: found the character \\x1b, which is not text; remove it"),
    "a key twice": ("training", "steps: 3", "4: the key steps was already given at FILE:3; keep one of the two"),
    "an unknown key inside": ("training", "save: {kep: 2}", "4: unknown key save.kep; did you mean keep?"),
    "a key of no neighbour": (
        "training",
        "save: {zzz: 2}",
        "4: unknown key save.zzz; expected every, keep or grace_seconds",
    ),
    "no value": ("training", "save: {keep: }", "4: save.keep is empty; expected a whole number"),
    "a fraction": ("training", "batch_size: 1.5", "4: batch_size is 1.5; expected a whole number"),
    "a number in quotes": (
        "training",
        "lr_schedule: {minimum: '0.5'}",
        "4: lr_schedule.minimum is '0.5'; expected a number; leave the quotes out",
    ),
    "a number for text": ("training", "mask: 3", "4: mask is 3; expected text; write it in quotes"),
    "a choice misspelt": (
        "training",
        "dtype: bf6",
        "4: dtype is 'bf6'; expected fp64, fp32 or bf16; did you mean bf16?",
    ),
    "a bare word": (
        "training",
        "deterministic: on",
        "4: YAML reads the bare word on as a truth value; write true or false, or 'on' in quotes for the word",
    ),
    "a length": (
        "training",
        "seq_len: 64q",
        "2: seq_len: '64q' is not a length; write a number of tokens such as 4096, 64k or 1M",
    ),
    "a value that a class refuses": (
        "training",
        "save:\n  every: 1\n  keep: 0",
        "6: save.keep is 0; give at least 1, from which the run can resume",
    ),
    "a choice of a site": (
        "inventory",
        "container: {engine: dockr}",
        "2: container.engine is 'dockr'; expected none, docker or podman; did you mean docker?",
    ),
    "a value that a site refuses": (
        "inventory",
        "network:\n  hcas: []\n  mtu: 9",
        "4: network.mtu is 9; expected 576 to 65536 bytes",
    ),
    "a flag as a variable": (
        "inventory",
        "environment: {NCCL_DEBUG: true}",
        "2: environment.NCCL_DEBUG is true; expected text; write it in quotes",
    ),
    "a path that lacks": ("inventory", "disks: [{warn_percent: 3}]", "2: disks lacks path; add what is missing"),
    "a list for a mapping": ("inventory", "gpus: [8]", "2: gpus is a list; expected a mapping of count, model"),
}
_BEGINNING = {"training": "model: tiny\nseq_len: 1k\nsteps: 10\n", "inventory": "nodes: [gpu01]\n"}


@pytest.mark.parametrize("mistake", SENTENCES)
def test_a_mistake_has_its_sentence_with_the_line_of_the_value(mistake: str, tmp_path: Path) -> None:
    kind, line, sentence = SENTENCES[mistake]
    beginning = _BEGINNING[kind]
    if line.startswith("seq_len"):
        beginning, line = beginning.replace("seq_len: 1k", line), ""
    path = tmp_path / "file.yaml"
    assert sentence_of(KINDS[kind][0], path, f"{beginning}{line}\n") == f"{path}:{sentence.replace('FILE', str(path))}"


def sentence_of(read: Callable[[Path], object], path: Path, text: str) -> str | None:
    """What the reader says of a file with this text; None where it reads it."""
    path.write_text(text, encoding="utf-8")
    try:
        read(path)
    except UsageError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_read_or_refused_in_one_sentence_that_says_where(kind: str, tmp_path: Path) -> None:
    read, texts, seed = KINDS[kind]
    (tmp_path / "site.yaml").write_text(_SITE, encoding="utf-8")
    texts = tuple(text.replace("SITE", "site.yaml") for text in texts)
    path = tmp_path / "file.yaml"
    for number, text in enumerate(texts):
        assert sentence_of(read, path, text) is None, f"{number}: the whole file is not read"
    refused = 0
    for text in mutated(texts, 60, seed):
        said = sentence_of(read, path, text)
        if said is None:
            continue
        refused += 1
        assert "\n" not in said, said
        assert not re.search(r"[A-Z]\w*Error|<class|\$\.|object at 0x", said), said
        place, colon, sentence = said.partition(": ")
        assert colon, said
        assert re.fullmatch(re.escape(str(path)) + r"(:\d+)?( at scale \w+)?", place), said
        if not re.search(
            " lacks | is given; add | has no node left|is empty; |without torch|; add at the top level", sentence
        ):
            assert place[-1].isdigit(), f"no line: {said}"
            assert 1 <= int(place.rpartition(":")[2]) <= text.count("\n") + 1, said
        assert re.search(r"; |, which |did you mean|expected|needs|Every file", sentence), f"no next step: {said}"
    assert refused > 30


_HERE = Machine(hostname="here", device="cpu", cores=2, memory_gib=8.0)
_SWEEP = """\
task: attention
model: tiny
fixed: {method: burst, dtype: fp32}
sweep: {seq_len: [256, 512]}
steps: {warmup: 0, measured: 3}
"""
SEED = 5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, and a folder with two published ones, one packed and one unpacked."""
    folder = tmp_path_factory.mktemp("results")
    (folder / "exp.yaml").write_text(_SWEEP)
    run = folder / "run"
    trials = plan(load_experiment(folder / "exp.yaml"), _HERE)
    directory = RunDirectory(run)
    for trial in trials:
        leave_record(directory, trial)
        (directory.trial(trial.id) / "progress.jsonl").write_text('{"step": 1, "of": 3, "loss": 1.0, "seconds": 0.1}\n')
        (directory.trial(trial.id) / "trial.json").write_text('{"settings": {}, "method": "x", "round": 1}')
    directory.describe(
        experiment="exp", title="", trials=[trial.id for trial in trials], started_at="2026-01-02T03:04:05+00:00",
        rounds=1, command=["burst", "run", "exp.yaml"],
    )  # fmt: skip
    (run / EXPERIMENT_FILE).write_text(_SWEEP)
    (run / PROVENANCE_FILE).write_text(STATED)
    write_report([run], run, ("csv", "md"))
    published = folder / "published" / "cpu"
    published.mkdir(parents=True)
    assert main(["verify", "pack", str(run), "--out", str(published / "packed.jsonl")]) == 0
    shutil.copytree(run, published / "unpacked")
    return folder


COMMANDS = {
    "run": (
        "status run", "verify run", "compare run whole", "compare run", "report run --format csv,md,html,tex",
        "run exp.yaml --out run --resume --mix --launcher local",
    ),
    "published": (
        "verify published", "compare published/cpu/packed.jsonl whole", "report published --out site",
        "archive published/cpu/packed.jsonl --out again.jsonl", "compare whole published/cpu/unpacked",
    ),
}  # fmt: skip


def _waits_for_ever(*_: object) -> None:
    raise AssertionError("it waits, as a read of a pipe does")


@pytest.mark.parametrize(
    ("damaged", "directories"), [*((each, 5) for each in COMMANDS), *slow(*((each, 50) for each in COMMANDS))]
)
def test_a_damaged_directory_is_read_or_refused_in_one_sentence_by_every_command(
    damaged: str,
    directories: int,
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("harness.commands.run.machine_and_launcher", lambda *_: (_HERE, ScriptedLauncher({})))
    signal.signal(signal.SIGALRM, _waits_for_ever)
    chance = random.Random(SEED)
    noticed = 0
    for number in range(directories):
        folder = Path(shutil.copytree(results, tmp_path / str(number)))
        shutil.copytree(folder / "run", folder / "whole")
        monkeypatch.chdir(folder)
        done = damage(folder / damaged, chance)
        for command in COMMANDS[damaged]:
            capsys.readouterr()
            signal.alarm(int(AMPLE))
            try:
                code = main(command.split())
            except BaseException as error:
                raise AssertionError(f"damaged directory {number} ({done}): burst {command}") from error
            finally:
                signal.alarm(0)
            said = capsys.readouterr()
            about = f"damaged directory {number} ({done}): burst {command} -> {code}: {said.err or said.out}"
            assert code in (0, 1, 2), about
            assert "Traceback" not in said.out + said.err, about
            noticed += code > 0
            if code == 2:
                sentences = [line for line in said.err.split("\n") if line.startswith("burst: ")]
                assert len(sentences) == 1, about
                assert not re.search(r"<class|object at 0x", said.err), about
    assert noticed > directories // 2
