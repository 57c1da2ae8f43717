"""A run of adapters: resumed bit for bit, on these ranks or others, and judged as peft judges what it exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.data import open_tokens
from engine.data.sequences import spans
from engine.hf import export_adapters, export_hugging_face
from engine.initialise import initialise
from engine.lora import Lora, adapter_sizes
from engine.models.decoder import Decoder
from engine.settings import Checkpoint
from engine.training.config import Evaluation
from engine.training.state import whole_parameters
from tests.engine.training.training_runs import SHAPE, config, curve, order, several
from tests.ranks import run_on_ranks

SEQUENCES = 3
LORA = Lora(rank=2, alpha=3.0, targets=("q", "v", "output", "gate", "down"))


def peft_loss(model: str, adapters: Path) -> float:
    """Mean loss of the first held-out sequences, by transformers and peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapters)
    store = open_tokens("python_docs")
    start = spans(store.header, built=False)[1].start
    rows = torch.stack([store.window(start + 32 * number, 33) for number in range(SEQUENCES)])
    with torch.no_grad():
        logits = adapted(rows[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


def test_adapters_resume_and_are_judged_as_peft_judges_them(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="it loads what is exported: extra `test` has it")
    with torch.device("meta"):
        base = Decoder(SHAPE)
    initialise(base, 3, torch.device("cpu"))
    model = str(export_hugging_face(base.state_dict(), SHAPE, tmp_path / "model"))
    choices = {"lora": LORA, "init_from": model, "evaluate": Evaluation(every=3, sequences=SEQUENCES)}
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    six = config(cp_size=2, **choices)
    starts = [(whole, order(six), None), (parts, order(six), 3), (parts, order(six, resume=True), None)]
    once, _, resumed = run_on_ranks(2, several, starts)[0]
    assert curve(resumed) == curve(once)
    assert resumed["parameters"] == once["parameters"]
    for name, value in base.named_parameters():
        assert once["parameters"][name] == value.flatten().tolist(), name

    shape, adapters = whole_parameters(tmp_path / "parts" / "checkpoints" / "step-00000006")
    assert list(adapters) == list(adapter_sizes(SHAPE, LORA))
    assert {name: value.flatten().tolist() for name, value in adapters.items()}.items() <= once["parameters"].items()
    export_adapters(adapters, shape, LORA, tmp_path / "adapters", base=model, dtype=torch.float32)
    judged = curve(once, "evaluation")[-1][2]
    assert peft_loss(model, tmp_path / "adapters") == pytest.approx(judged, rel=1e-5)

    levers = {"checkpoint": Checkpoint(tail=0.5), "optimizer_offload": True, "mlp_tiles": 2}
    other = order(config(batch_size=1, gradient_accumulation=2, **levers, **choices), resume=True)
    (tmp_path / "parts" / "checkpoints" / "step-00000006").rename(tmp_path / "later")
    [alone] = run_on_ranks(1, several, [(parts, other, None)])[0]
    for line, expected in zip(curve(alone), curve(once), strict=True):
        assert line == pytest.approx(expected, rel=2e-5)
