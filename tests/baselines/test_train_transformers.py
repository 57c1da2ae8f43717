"""The program that trains a Llama of transformers, run for real on a CPU rank: without a trainer, and without Liger's
kernels, which are of GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from baselines.programs import PROGRAMS
from baselines.programs.program_parts import batch, llama_config
from baselines.tokens import PLAIN, write_tokens
from baselines.transformers import Transformers
from baselines.transformers.transformers_bf16 import TransformersBf16
from baselines.upstream import PrintedSteps
from engine.settings import Checkpoint, ModelShape, Steps, TrialSettings

SHAPE = ModelShape(name="small", layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)


def steps_of(method: Transformers, folder: Path, **changes: object) -> tuple[dict[str, object], PrintedSteps]:
    """What the program was asked, and what it printed."""
    values = {
        "task": "train", "method": method.name, "model": SHAPE, "seq_len": 64, "learning_rate": 3e-3,
        "checkpoint": Checkpoint(every=1, tail=0), "steps": Steps(warmup=1, measured=3),
    }  # fmt: skip
    settings = TrialSettings(**values | changes)  # type: ignore[arg-type]
    assert method.refuse(settings) is None
    write_tokens(settings, method.steps(settings), method.tokens, folder)
    request = method.request(settings, folder)
    assert request["tokens"] == str(folder / "tokens" / PLAIN)
    (folder / "request.json").write_text(json.dumps(request))
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "train_transformers.py"), str(folder / "request.json")],
        env=os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = method.parse(done.stdout)
    assert len(printed.step_seconds) == len(printed.grad_norm) == 4
    return request, printed


def first_loss(request: dict[str, object]) -> float:
    """Of the same model, each token of the first batch predicted from those before it, the last one included."""
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(llama_config(request), attn_implementation="eager", dtype=torch.float32)
    inputs, targets = batch(request, 0, 0, 1)
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
    return torch.nn.functional.cross_entropy(logits[0], targets[0]).item()


def test_it_trains_on_every_token_of_the_trial_with_weights_in_fp32(tmp_path: Path) -> None:
    request, printed = steps_of(Transformers(), tmp_path, dtype="fp32")
    assert printed.loss[0] == pytest.approx(first_loss(request), abs=1e-5)
    assert printed.loss[3] < printed.loss[0] - 0.05


@pytest.mark.slow
def test_recomputation_changes_nothing_but_memory(tmp_path: Path) -> None:
    _, again = steps_of(Transformers(), tmp_path, dtype="fp32")
    request, kept = steps_of(Transformers(), tmp_path, dtype="fp32", checkpoint=Checkpoint(every=0))
    assert request["recompute"] is False
    assert kept.loss == pytest.approx(again.loss, abs=1e-5)


def test_gradients_have_the_dtype_of_the_weights(tmp_path: Path) -> None:
    """Norms that are bf16 numbers show gradients in bf16; under autocast gradients and their norms are fp32."""
    request, in_bf16 = steps_of(TransformersBf16(), tmp_path, dtype="bf16")
    assert all(as_bf16(norm) == norm for norm in in_bf16.grad_norm)
    _, under_autocast = steps_of(Transformers(), tmp_path, dtype="bf16")
    assert not any(as_bf16(norm) == norm for norm in under_autocast.grad_norm)
    for printed in (in_bf16, under_autocast):
        assert printed.loss[0] == pytest.approx(first_loss(request), abs=0.03)


def as_bf16(value: float) -> float:
    return torch.tensor(value).bfloat16().item()
