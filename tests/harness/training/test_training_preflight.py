"""Runs whose settings do not fit their data, weights or checkpoints: refused before a rank starts, leaving nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.data import open_tokens
from engine.data.sequences import spans
from engine.data.store import build_store
from engine.data.tokenizers import ByteTokenizer
from engine.hf import SINGLE
from engine.models.architecture import architecture_named, config_of
from engine.settings import TrialSettings
from engine.shape import ModelShape
from engine.training.config import Evaluation, TrainingConfig
from engine.training.files import METRICS_FILE, RUN_FILE, checkpoints_directory
from engine.training.manifest import Manifest, checkpoint_path, write_manifest
from engine.training.preflight import facts_of
from harness.base.errors import UsageError
from harness.launch.launcher import Job, Outcome
from harness.machine.this_machine import Machine
from harness.training.run import Start, order_of, train

MODEL = ModelShape(name="m", layers=2, hidden=16, ffn=24, heads=2, kv_heads=1, head_dim=8, vocab=256)
SETTINGS = TrialSettings(task="train", method="burst", model=MODEL, seq_len=32, cp_size=2, dtype="fp32")
CPU = Machine(hostname="here", device="cpu", cores=2, memory_gib=8.0)
DTYPES = {"F16": np.float16, "F32": np.float32, "I8": np.int8}


class NoLauncher:
    """Starts nothing: a job that reaches it has not been refused."""

    name = "none"

    def run(self, job: Job, on_progress: Callable[[dict[str, object]], None] | None = None) -> Outcome:
        raise AssertionError(f"{job.trial_id} was started")

    def close(self) -> None:
        pass


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory but for a text, with a cache beside it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("BURST_CACHE", str(tmp_path / "cache"))
    Path("text.txt").write_text("a line of text to learn from\n" * 100)
    return tmp_path / "here"


def config(**changes: Any) -> TrainingConfig:
    """Ten steps on the text; `changes` are fields of the configuration or of its settings."""
    engines = TrialSettings.__dataclass_fields__.keys() - {"steps"}
    settings = {name: value for name, value in changes.items() if name in engines}
    own = {name: value for name, value in changes.items() if name not in settings}
    return TrainingConfig(**{"settings": replace(SETTINGS, **{"data": "text.txt"} | settings), "steps": 10} | own)


def refused(case: TrainingConfig, *, resume: bool = False) -> str:
    """The sentence with which a run is refused."""
    start = Start(
        machine=CPU, launcher=NoLauncher(), run_dir=Path("run"), resume=resume, commit="abc", again=["burst", "train"]
    )
    with pytest.raises(UsageError) as error:
        train(case, start, lambda line: None, lambda line: None)
    assert "\n" not in str(error.value)
    return str(error.value)


def weights(
    shape: ModelShape = MODEL,
    *,
    tied: bool = False,
    dtype: str = "F16",
    without: str = "",
    sizes: dict[str, tuple[int, ...]] | None = None,
    **changes: Any,
) -> str:
    """A model in Hugging Face's layout, one file of tensors of zeros; `changes` are of its config.json."""
    save_file = pytest.importorskip("safetensors.numpy", reason="the safetensors library is not installed").save_file
    directory = Path("model")
    directory.mkdir()
    theirs = {
        each.name: each.size(shape.parameter_sizes()) for each in architecture_named(shape.architecture).stored(shape)
    } | (sizes or {})
    if tied:
        del theirs["lm_head.weight"]
    theirs.pop(without, None)
    save_file({name: np.zeros(size, DTYPES[dtype]) for name, size in theirs.items()}, directory / SINGLE)
    content = config_of(shape, "float16", None) | {"tie_word_embeddings": tied} | changes
    (directory / "config.json").write_text(json.dumps(content))
    return str(directory)


def tree(place: Path) -> list[Path]:
    return sorted(place.rglob("*"))


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: weights(replace(MODEL, layers=1)), "holds a model with layers 1, but model m has 2; choose the model"),
        (lambda: weights(replace(MODEL, hidden=32)), "holds a model with hidden 32, but model m has 16"),
        (lambda: weights(replace(MODEL, vocab=320)), "holds a model with vocab 320, but model m has 256"),
        (lambda: weights(replace(MODEL, kv_heads=2)), "holds a model with kv_heads 2, but model m has 1"),
        (lambda: weights(replace(MODEL, rope_base=5e5)), "holds a model with rope_base 500000.0, but model m has"),
        (
            lambda: weights(replace(MODEL, qk_norm=True, architecture="qwen3")),
            "holds a model with qk_norm True, but model m has False",
        ),
        (lambda: weights(tied=True, tie_word_embeddings=False), "model: lacks lm_head.weight; fetch the missing files"),
        (lambda: weights(tied=True, without="model.embed_tokens.weight"), "model: lacks model.embed_tokens.weight"),
        (lambda: weights(dtype="I8"), "embed_tokens.weight is saved as I8; expected one of F64, F32, F16, BF16"),
        (lambda: weights(without=Q), f"model: lacks {Q}; fetch the missing files"),
        (lambda: weights(sizes={Q: (16, 8)}), f"{Q} has size [16, 8], but config.json makes it [16, 16]"),
        (lambda: weights(sizes={"model.layers.0.bias": (2,)}), "holds model.layers.0.bias, which this model has no"),
        (lambda: weights(rope_scaling={"type": "linear"}), "config.json: factor is missing"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_left(place: Path, made: Any, words: str) -> None:
    case = config(init_from=made())
    before = tree(place)
    said = refused(case)
    assert said.startswith("this run cannot start: ")
    assert words in said
    assert tree(place) == before


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda model: (model / SINGLE).unlink(), "holds neither model.safetensors.index.json nor model.safetensors"),
        (lambda model: (model / "config.json").unlink(), "config.json: cannot be read (No such file or directory)"),
        (lambda model: (model / SINGLE).write_bytes((model / SINGLE).read_bytes()[:-1]), "not readable as safetensors"),
        (lambda model: (model / "config.json").write_text("{"), "config.json: not readable as JSON"),
    ],
)
def test_a_damaged_model_is_refused_and_nothing_is_left(place: Path, damage: Any, words: str) -> None:
    case = config(init_from=weights())
    damage(Path("model"))
    before = tree(place)
    assert words in refused(case)
    assert tree(place) == before


def tokenizer(words: int, added: int) -> None:
    content = {
        "model": {"type": "BPE", "vocab": {f"w{number}": number for number in range(words)}, "merges": []},
        "added_tokens": [{"id": words + number, "content": f"<{number}>"} for number in range(added)],
    }
    Path("model", "tokenizer.json").write_text(json.dumps(content))


def test_tokens_of_another_tokenizer_than_that_of_the_weights_are_refused(place: Path) -> None:
    case = config(init_from=weights())
    tokenizer(200, 3)
    assert refused(case) == (
        "this run cannot start: init_from model has a tokenizer of 203 tokens, but text.txt holds tokens of tokenizer "
        "bytes, which has 256; build a store with `burst train data --tokenizer model/tokenizer.json`"
    )
    assert not Path("run").exists()


def test_a_store_of_a_larger_vocabulary_than_the_models_is_refused(place: Path) -> None:
    class Wide(ByteTokenizer):
        vocabulary = 300

    build_store(["text.txt"], Path("store"), Wide(), 0.1)
    assert "has a vocabulary of 256, but the tokens of store need 300" in refused(config(data="store"))


@pytest.mark.parametrize(("tied", "tokens"), [(False, 0), (True, 0), (False, 256)])
def test_weights_that_fit_are_started_from(place: Path, tied: bool, tokens: int) -> None:
    case = config(init_from=weights(tied=tied), model=replace(MODEL, tied=tied))
    if tokens:
        tokenizer(tokens, 0)
    start = Start(machine=CPU, launcher=NoLauncher(), run_dir=Path("run"), resume=False, commit="abc", again=["burst"])
    with pytest.raises(AssertionError, match="run was started"):
        train(case, start, lambda line: None, lambda line: None)


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        (
            "only a few words",
            {},
            "text.txt 0 are held out, and the 16 to train on hold no such sequence, which takes 33",
        ),
        (
            "text " * 200,
            {"seq_len": 990},
            "of the 1000 tokens of text.txt 10 are held out, and the 990 to train on",
        ),
        ("text " * 100, {"evaluate": Evaluation(every=1)}, "evaluate.sequences is 8, but the 5 held-out tokens of"),
        ("text " * 200, {"longer_documents": "drop"}, "longer_documents is drop, but mask is causal, and rows are"),
        ("", {}, "data 'text.txt' is empty; give a text of at least one byte"),
        ("x" * 70_000 + "\udcff", {}, "data 'text.txt' is not UTF-8 at byte 70000; give a text file"),
        ('{"text": "a"}\n{"text": "b"}\n', {}, "data 'text.txt' looks like JSON Lines"),
    ],
)
def test_data_that_cannot_be_learnt_from_is_refused_and_nothing_is_left(place, text, changes, words):
    Path("text.txt").write_text(text, errors="surrogateescape")
    before = tree(place)
    assert words in refused(config(**changes))
    assert tree(place) == before


@pytest.mark.parametrize(
    ("changes", "metrics", "words"),
    [
        (
            {"seq_len": 64},
            b"",
            "checkpoint step-00000004 cannot be resumed from: it was made with seq_len 32, and the run",
        ),
        ({"model": replace(MODEL, layers=3)}, b"", "it was made with model.layers 2, and the run now has 3"),
        ({"packing": "greedy"}, b"", "packing is greedy, but mask is causal, and rows are packed under"),
        ({"steps": 3}, b"", "steps is 3, but 4 steps of this run are done; give at least as many"),
        (
            {},
            b'{"kind": "st\n',
            "run/metrics.jsonl holds a line that is no metric (line 1: it is no JSON in UTF-8)",
        ),
        ({}, b"\n\xff\xfe\n", "run/metrics.jsonl holds a line that is no metric (line 2: it is no JSON in UTF-8)"),
        ({}, b'{"kind": "step"}\n', "no metric (line 1: the whole lacks step, loss; add what is missing); remove that"),
        ({}, b"5\n", "no metric (line 1: the whole is 5; expected a mapping of kind, step, loss"),
    ],
)
def test_a_run_that_cannot_go_on_is_refused_and_stays_what_it_was(
    place: Path, changes: Any, metrics: bytes, words: str
) -> None:
    made = order_of(config(), CPU, resume=False)
    header = open_tokens("text.txt").header
    facts = facts_of(made, header, spans(header, built=False)[1])
    checkpoint = checkpoint_path(checkpoints_directory(Path("run")), 4)
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, Manifest(step=4, facts=facts, model=asdict(MODEL), files={}, software={}))
    Path("run", RUN_FILE).write_text("{}")
    if metrics:
        Path("run", METRICS_FILE).write_bytes(metrics)
    before = tree(place)
    assert words in refused(config(**changes), resume=True)
    assert [path for path in tree(place) if path.name != ".lock"] == before
    assert Path("run", RUN_FILE).read_text() == "{}"


def test_a_step_larger_than_all_data_is_said_before_the_run_starts(place: Path) -> None:
    said: list[str] = []
    start = Start(
        machine=CPU, launcher=NoLauncher(), run_dir=Path("run"), resume=False, commit="abc", again=["burst", "train"]
    )
    with pytest.raises(AssertionError, match="was started"):
        train(config(batch_size=90), start, lambda line: None, said.append)
    assert said[-1].startswith("a step takes 90 sequences, but text.txt holds 89 to train on, so each step reads")


def test_a_run_without_a_checkpoint_is_not_begun_anew(place: Path) -> None:
    Path("run").mkdir()
    Path("run", RUN_FILE).write_text("{}")
    assert refused(config(), resume=True).endswith(
        "there is no checkpoint to resume from (checkpoints/ holds none); start anew without --resume"
    )


def test_looking_ahead_needs_no_torch(place: Path) -> None:
    program = (
        "from engine.settings import *; from engine.training.config import *; from engine.training.preflight import *; "
        f"settings = TrialSettings(task='train', method='burst', model={MODEL!r}, seq_len=32, data='text.txt'); "
        f"config = TrainingConfig(settings=settings, steps=1, init_from={weights()!r}); "
        "check_start(Order(config=config, method='', resume=False, model_flops_per_step=1.0, peak_tflops=None)); "
        "print('torch' in sys.modules)"
    )
    root = str(Path(__file__).parents[3])
    code = f"import sys; sys.path.insert(0, {root!r}); {program}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
