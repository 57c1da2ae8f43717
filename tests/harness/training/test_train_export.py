"""`burst train export` of a run that started from a folder: what it keeps of it, and what its output notes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from engine.hf import export_hugging_face
from engine.initialise import initialise
from engine.models.decoder import Decoder
from engine.shape import ModelShape
from harness.cli import main

SHAPE = ModelShape(
    name="base", architecture="mistral", layers=1, hidden=16, ffn=24, heads=2, kv_heads=2, head_dim=8, vocab=256
)
CONFIG = """\
model: base
init_from: base
data: text.txt
seq_len: 32
steps: 1
mask: sliding_window:7
dtype: fp32
checkpoint: {every: 0}
"""
IDS = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, `base`, and a run of one step from it."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "train.yaml").write_text(CONFIG)
    (folder / "text.txt").write_text("a line of text to learn from\n" * 100)
    model = Decoder(SHAPE).to("meta")
    initialise(model, 0, torch.device("cpu"))
    base = export_hugging_face(model.state_dict(), SHAPE, folder / "base", max_positions=4096)
    set_keys(base / "config.json", **IDS)
    (base / "generation_config.json").write_text('{"temperature": 0.6}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "train.yaml", "--launcher", "local", "--out", "run"]) == 0
    return folder


@pytest.fixture
def workplace(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in which the test runs."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def set_keys(path: Path, **keys: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def exported(capsys: pytest.CaptureFixture[str], out: str) -> tuple[dict, list[str]]:
    """The configuration that is written, and the lines of output after the first."""
    capsys.readouterr()
    assert main(["train", "export", "run", "--out", out]) == 0
    return json.loads(Path(out, "config.json").read_text()), capsys.readouterr().out.splitlines()[1:]


def trained_with(**facts: str) -> None:
    (manifest,) = Path("run/checkpoints").glob("step-*/checkpoint.json")
    set_keys(manifest, facts=json.loads(manifest.read_text())["facts"] | facts)


@pytest.mark.parametrize(
    "words",
    [
        ["train", "export", "run"],
        ["train", "data", "text.txt"],
        ["setup", "baselines", "bundle", "torchtitan"],
        ["setup", "calibrate"],
    ],
)
def test_a_place_that_takes_no_file_is_refused_by_every_command_that_writes_beside_it(workplace, words, capsys):
    assert main([*words, "--out", "/proc/x"]) == 2
    said = "burst: /proc cannot be written to (No such file or directory); give --out another directory\n"
    assert capsys.readouterr().err.endswith(said)


def test_an_export_keeps_what_the_model_it_started_from_says_and_the_window(workplace, capsys):
    config, notes = exported(capsys, "model")
    assert {key: config[key] for key in IDS} == IDS
    assert (config["max_position_embeddings"], config["sliding_window"], notes) == (4096, 8, [])
    assert Path("model/generation_config.json").read_text() == '{"temperature": 0.6}\n'


@pytest.mark.parametrize("mask", ["full", "sliding_window:7:1", "block_sparse:16:10/11:causal"])
def test_a_mask_that_transformers_does_not_have_is_noted(workplace, capsys, mask):
    trained_with(mask=mask)
    config, notes = exported(capsys, "model")
    assert config["sliding_window"] is None
    assert notes == [
        f"note: the run trained with mask {mask}, and MistralForCausalLM attends causally; load it into a model that "
        "attends as the run did"
    ]


@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_causal_attention_needs_no_note(workplace, capsys, mask):
    trained_with(mask=mask)
    config, notes = exported(capsys, "model")
    assert (config["sliding_window"], notes) == (None, [])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda base: shutil.rmtree(base), "base/config.json: cannot be read (No such file or directory)"),
        (lambda base: set_keys(base / "config.json", head_dim=4), "init_from base holds a model with head_dim 4, but "),
    ],
)
def test_a_folder_that_is_gone_or_another_model_is_noted(workplace, capsys, change, found):
    change(workplace / "base")
    config, (note,) = exported(capsys, "model")
    assert note.startswith(f"note: {found}")
    assert note.endswith(
        ", so ids of special tokens, max_position_embeddings and generation_config.json of init_from are not kept; put "
        "its folder back and export again, or set them yourself"
    )
    assert config["max_position_embeddings"] == 32
    assert {config[key] for key in IDS} == {None}
    assert not Path("model/generation_config.json").exists()


def test_a_model_with_dropout_is_refused_as_shape_and_as_start(workplace, capsys):
    set_keys(workplace / "base/config.json", attention_dropout=0.1)
    for config in (CONFIG, CONFIG.replace("init_from: base\n", "")):
        Path("train.yaml").write_text(config)
        assert main(["train", "train.yaml", "--launcher", "local", "--out", "other"]) == 2
        sentence = "config.json: attention_dropout is 0.1, and nothing is dropped in training here; set it to 0"
        assert sentence in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("tokenizer", ["bytes", "llama"])
@pytest.mark.parametrize(("text", "end"), [("a line of text to learn from\n", 7), ("other text\n", None)])
def test_a_model_from_random_weights_has_the_end_of_text_of_its_data_and_no_token_of_llama_2(
    workplace, capsys, text, end, tokenizer
):
    trained_with(tokenizer=tokenizer)
    Path("store.txt").write_text(text * 100)
    assert main(["train", "data", "store.txt", "--out", "store"]) == 0
    set_keys(Path("store/header.json"), end_of_text=7)
    run = json.loads(Path("run/training.json").read_text())
    run["config"]["init_from"], run["config"]["settings"]["data"] = "", "store"
    Path("run/training.json").write_text(json.dumps(run))
    config, notes = exported(capsys, "model")
    assert {key: config[key] for key in IDS} == {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}
    lost = end is None and tokenizer == "llama"
    assert notes == lost * [
        "note: store does not hold the tokens that the run trained on, so eos_token_id is null; put the store back and "
        "export again, or set it yourself"
    ]
