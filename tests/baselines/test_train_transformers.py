"""The program that trains a model of transformers, run for real on a CPU rank: without a trainer, and without Liger's
kernels, which are of GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import LlamaForCausalLM

from baselines.programs import PROGRAMS
from baselines.programs.program_parts import batch, model_config
from baselines.tokens import PLAIN, write_tokens
from baselines.transformers import Transformers
from baselines.transformers.transformers_bf16 import TransformersBf16
from baselines.transformers.transformers_padded import TransformersPadded
from baselines.upstream import PrintedSteps
from engine.initialise import initialise
from engine.models.architecture import architecture_named
from engine.models.decoder import Decoder
from engine.settings import Checkpoint, Steps, TrialSettings
from engine.shape import ModelShape
from harness.spec.models import named_model
from tests.patience import AMPLE

SHAPE = ModelShape(name="small", layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)
HYBRID = named_model("tiny_hybrid")

# Imports once, and runs the program for each request in a process of its own.
STARTER = """
import os, runpy, sys
from transformers import LlamaForCausalLM, Qwen3_5ForCausalLM

program, *folders = sys.argv[1:]
sys.path[0] = os.path.dirname(program)
for folder in folders:
    child = os.fork()
    if not child:
        sys.argv = [program, os.path.join(folder, "request.json")]
        os.dup2(os.open(os.path.join(folder, "printed"), os.O_WRONLY | os.O_CREAT), 1)
        runpy.run_path(program, run_name="__main__")
    _, status = os.waitpid(child, 0)
    assert status == 0, folder
"""
CASES: dict[str, tuple[Transformers, dict[str, object]]] = {
    "fp32": (Transformers(), {"dtype": "fp32"}),
    "bf16": (TransformersBf16(), {"dtype": "bf16"}),
    "autocast": (Transformers(), {"dtype": "bf16"}),
    "kept": (Transformers(), {"dtype": "fp32", "checkpoint": Checkpoint(every=0)}),
    # Two sequences of four documents.
    "packed": (Transformers(), {"dtype": "fp32", "mask": "documents:25,1,20,18", "batch_size": 2}),
    "padded": (TransformersPadded(), {"dtype": "fp32", "mask": "documents:25,1,20,18", "batch_size": 2}),
    "hybrid": (Transformers(), {"dtype": "fp32", "model": HYBRID}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, object], PrintedSteps]]:
    """By case: what the program was asked, and what it printed."""
    folders, requests = {name: tmp_path_factory.mktemp(name) for name in CASES}, {}
    for name, (method, changes) in CASES.items():
        values = {
            "task": "train", "method": method.name, "model": SHAPE, "seq_len": 64, "learning_rate": 3e-3,
            "checkpoint": Checkpoint(every=1, tail=0), "steps": Steps(warmup=1, measured=3),
        }  # fmt: skip
        settings = TrialSettings(**values | changes)  # type: ignore[arg-type]
        assert method.refuse(settings) is None
        write_tokens(settings, method.steps(settings), method.tokens, folders[name])
        requests[name] = method.request(settings, folders[name])
        assert requests[name]["tokens"] == str(folders[name] / "tokens" / PLAIN)
        (folders[name] / "request.json").write_text(json.dumps(requests[name]))
    done = subprocess.run(
        [sys.executable, "-c", STARTER, str(PROGRAMS / "train_transformers.py"), *map(str, folders.values())],
        env=os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=AMPLE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {}
    for name, (method, _) in CASES.items():
        printed = method.parse((folders[name] / "printed").read_text())
        assert len(printed.step_seconds) == len(printed.grad_norm) == 4
        found[name] = requests[name], printed
    return found


def our_model(request: dict[str, object]) -> LlamaForCausalLM:
    """A Llama with the weights of a trial of burst, brought over as files of weights are."""
    ours = Decoder(SHAPE)
    initialise(ours, 0, torch.device("cpu"))
    parameters = dict(ours.named_parameters())
    model = LlamaForCausalLM._from_config(model_config(request), attn_implementation="eager", dtype=torch.float32)
    stored = architecture_named("llama").stored(SHAPE)
    model.load_state_dict({one.name: one.join([parameters[part] for part in one.parts]) for one in stored})
    return model


def first_loss(request: dict[str, object]) -> float:
    """Of our model, each token of the first batch predicted from those before it, the last one included."""
    model = our_model(request)
    inputs, targets = batch(request, 0, 0, 1)
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
    return torch.nn.functional.cross_entropy(logits[0], targets[0]).item()


def losses(request: dict[str, object]) -> list[float]:
    """Of four steps from our weights, by the optimizer of a trial of burst."""
    model, found = our_model(request), []
    matrices, norms = ([each for each in model.parameters() if (each.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    for step in range(4):
        inputs, targets = batch(request, step, 0, 1)
        loss = torch.nn.functional.cross_entropy(model(input_ids=inputs).logits[0], targets[0])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_it_trains_on_every_token_of_the_trial_with_weights_in_fp32(runs) -> None:
    request, printed = runs["fp32"]
    assert printed.loss == pytest.approx(losses(request), abs=1e-5)
    assert len({round(loss, 3) for loss in printed.loss}) > 1


def test_recomputation_changes_nothing_but_memory(runs) -> None:
    request, kept = runs["kept"]
    assert request["recompute"] is False
    assert kept.loss == pytest.approx(runs["fp32"][1].loss, abs=1e-5)


def test_gradients_have_the_dtype_of_the_weights(runs) -> None:
    """Norms that are bf16 numbers show gradients in bf16; under autocast gradients and their norms are fp32."""
    request, in_bf16 = runs["bf16"]
    assert all(as_bf16(norm) == norm for norm in in_bf16.grad_norm)
    _, under_autocast = runs["autocast"]
    assert not any(as_bf16(norm) == norm for norm in under_autocast.grad_norm)
    for printed in (in_bf16, under_autocast):
        assert printed.loss[0] == pytest.approx(first_loss(request), abs=0.03)


def test_documents_do_not_see_each_other_packed_or_padded(runs) -> None:
    request, in_one_row = runs["packed"]
    _, padded = runs["padded"]
    model = our_model(request)
    inputs, targets = (each.reshape(-1).split([25, 1, 20, 18] * 2) for each in batch(request, 0, 0, 1))
    with torch.no_grad():
        logits = torch.cat([model(input_ids=document[None]).logits[0] for document in inputs])
    alone = torch.nn.functional.cross_entropy(logits, torch.cat(targets)).item()
    assert in_one_row.loss[0] == pytest.approx(alone, abs=1e-5)
    assert padded.loss == pytest.approx(in_one_row.loss, abs=1e-5)
    assert padded.grad_norm == pytest.approx(in_one_row.grad_norm, rel=1e-4)


def test_a_hybrid_takes_the_steps_of_ours_from_the_same_weights(runs) -> None:
    """Interleaved queries and gate, joined matrices, decays and taps among them."""
    request, printed = runs["hybrid"]
    model = Decoder(HYBRID)
    initialise(model, 0, torch.device("cpu"))
    matrices, others = ([each for each in model.parameters() if (each.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    losses, norms = [], []
    for step in range(4):
        inputs, targets = batch(request, step, 0, 1)
        loss = model(inputs, torch.arange(64), targets) / targets.numel()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert printed.loss == pytest.approx(losses, abs=1e-4)
    assert printed.grad_norm == pytest.approx(norms, rel=1e-3)
    assert printed.chosen == {"linear_kernel": "torch"}
    assert runs["fp32"][1].chosen == {}


def as_bf16(value: float) -> float:
    return torch.tensor(value).bfloat16().item()
