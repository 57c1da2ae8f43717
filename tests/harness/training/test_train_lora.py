"""`burst train examples/train_lora.yaml`, from the model that it adapts to the adapters in peft, on CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.hf import export_hugging_face
from engine.initialise import initialise
from engine.models.decoder import Decoder
from harness.cli import main
from harness.spec.models import named_model

EXAMPLES = Path(__file__).parents[3] / "examples"


def base_model(folder: str, seed: int) -> None:
    """A model of the example's shape, with random values."""
    model = Decoder(named_model("tiny")).to("meta")
    initialise(model, seed, torch.device("cpu"))
    export_hugging_face(model.state_dict(), model.shape, Path(folder))


def train(*changes: str, resume: bool = False) -> int:
    fixed = ("steps=2", "lr_schedule.warmup=1", "evaluate.every=2", *changes)
    options = [word for change in fixed for word in ("--set", change)]
    config = str(EXAMPLES / "train_lora.yaml")
    return main(["train", config, "--launcher", "local", "--out", "run", *options, *["--resume"] * resume])


def test_the_example_trains_adapters_that_peft_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft", reason="it loads what is exported: extra `test` has it")
    from transformers import AutoModelForCausalLM

    monkeypatch.chdir(tmp_path)
    base_model("base-model", seed=0)
    base_model("another", seed=1)
    lines = str(EXAMPLES / "documents.jsonl")
    assert main(["train", "data", lines, "--field", "text", "--validation", "0.2", "--out", "store"]) == 0
    assert train() == 0
    judged = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    before, after = (line["loss"] for line in judged if line["kind"] == "evaluation")
    assert after < before

    capsys.readouterr()
    refusals = {
        "init_from=another": "it was made with init_from of sha256 ",
        "lora.rank=4": "made with lora rank 8, alpha 16, q k v output gate up down, and the run now has rank 4, alpha",
        "lora=null": "made with lora rank 8, alpha 16, q k v output gate up down, and the run now has null; ",
    }
    for change, sentence in refusals.items():
        assert train(change, resume=True) == 2
        assert sentence in capsys.readouterr().err

    assert main(["train", "export", "run", "--out", "adapters"]) == 0
    assert capsys.readouterr().out == "adapters: adapters of tiny after step 2, 38,912 parameters, fp32\n"
    manifest = Path("run/checkpoints/step-00000002/checkpoint.json")
    written = manifest.read_text()
    mask = json.loads(written)["facts"]["mask"]
    manifest.write_text(written.replace(f'"mask": "{mask}"', '"mask": "sliding_window:7"'))
    assert main(["train", "export", "run", "--out", "windowed"]) == 0
    assert "trained with mask sliding_window:7, and LlamaForCausalLM attends causally" in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained("base-model")
    tokens = torch.arange(8)[None]
    plain = base(tokens).logits
    model = peft.PeftModel.from_pretrained(base, "adapters")
    assert model.peft_config["default"].base_model_name_or_path == "base-model"
    adapted = model(tokens).logits
    assert not torch.allclose(adapted, plain, atol=1e-3)
    torch.testing.assert_close(model.merge_and_unload()(tokens).logits, adapted, rtol=1e-4, atol=1e-4)
