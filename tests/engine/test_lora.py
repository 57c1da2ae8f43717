"""LoRA beside peft in float64: the same model, the same adapters, in the form in which a run exports them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.data import open_tokens
from engine.hf import adapter_unsupported_reason, export_adapters
from engine.lora import MODULES, Lora
from engine.method import method_unsupported_reason
from engine.models.architecture import shape_of
from engine.settings import Checkpoint, TrialSettings
from engine.tasks.check_training import draw_second_adapters
from engine.training.loop import start_from
from harness.spec.methods import method_named
from tests.engine.models.architectures import configuration, oracle
from tests.engine.models.float64 import in_float64
from tests.engine.parity import SECOND_STD, apart, task_of, whole_of
from tests.ranks import run_on_ranks
from tests.slow import slow

pytest.importorskip("peft", reason="its adapters are compared with: extra `test` has it")

ALL = Lora(rank=3, alpha=5.0, targets=tuple(MODULES))
SOME = Lora(rank=2, alpha=1.0, targets=("v", "output", "up"))
# A model, its adapters, and how the ranks compute: whole, again, in tiles, in micro-batches, with states on the host.
KEPT = {"checkpoint": Checkpoint(every=0, mlp=0.4), "projection_tiles": 3, "mlp_tiles": 3, "gradient_accumulation": 2}
AGAIN = {"checkpoint": Checkpoint(every=2, tail=0.35, offload="all"), "mlp_tiles": 2, "optimizer_offload": True}
CASES: dict[str, tuple[Lora, dict[str, Any]]] = {
    "llama 3": (ALL, KEPT),
    "qwen3": (ALL, AGAIN),
    "qwen2, tied": (SOME, AGAIN),
    "gemma3": (ALL, KEPT),
}


def of_ranks(cases: dict[str, TrialSettings], folder: str) -> dict[str, Any]:
    """Of each case the loss and every adapter's gradient on these ranks; the adapters are exported to `folder`."""
    found = {}
    for name, settings in cases.items():
        world, task = task_of(settings)
        start_from(task.model, Path(folder, name))
        draw_second_adapters(task.model, settings.seed, SECOND_STD)
        loss = task.gradients(0)
        torch.distributed.all_reduce(loss)
        trained = {key: each for key, each in task.model.named_parameters() if each.requires_grad}
        adapters = {key: whole_of(each).detach() for key, each in trained.items()}
        gradients = {key: whole_of(each.grad).numpy() for key, each in trained.items()}
        assert not any(each.grad is not None for each in task.model.parameters() if not each.requires_grad)
        if world.rank == 0:
            assert settings.lora is not None
            there = Path(folder, f"{name}, adapters")
            export_adapters(adapters, settings.model, settings.lora, there, base=name, dtype=torch.float64)
        found[name] = loss.item(), gradients if world.rank == 0 else {}
    return found


def by_peft(name: str, settings: TrialSettings, folder: Path) -> tuple[float, dict[str, Any]]:
    """The same of transformers' model with the exported adapters, in one process."""
    from peft import PeftModel

    tokens, labels = open_tokens(settings.data).batch(
        0, 0, 1, settings.batch_size * settings.gradient_accumulation, settings.seq_len
    )
    with in_float64():
        model = PeftModel.from_pretrained(oracle(name), folder / f"{name}, adapters", is_trainable=True)
        loss = torch.nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        loss.backward()
    return loss.item(), {key: each.grad.numpy() for key, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("world_size", [2, *slow(1, 4)])
def test_loss_and_every_adapter_gradient_are_those_of_peft(world_size: int, tmp_path: Path) -> None:
    cases = {}
    for name, (lora, levers) in CASES.items():
        oracle(name).save_pretrained(tmp_path / name)
        cases[name] = TrialSettings(
            task="train", method="burst", model=shape_of(configuration(name), name), seq_len=24, batch_size=2,
            dtype="fp64", world_size=world_size, cp_size=world_size, lora=lora, **levers,
        )  # fmt: skip
    found = run_on_ranks(world_size, of_ranks, cases, str(tmp_path))[0]
    for name, settings in cases.items():
        loss, gradients = found[name]
        expected, truth = by_peft(name, settings, tmp_path)
        assert loss == pytest.approx(expected, rel=1e-10), name
        assert len(gradients) == len(truth) == 2 * settings.model.layers * len(settings.lora.targets), name
        for key, gradient in gradients.items():
            [match] = [each for at, each in truth.items() if same_matrix(key, at)]
            assert apart(gradient, match) < 1e-10, (name, key)


def same_matrix(ours: str, of_peft: str) -> bool:
    """Whether blocks.1.attention.q.lora_A is base_model.model.model.layers.1.self_attn.q_proj.lora_A.default.weight."""
    _, layer, _, matrix, kind = ours.split(".")
    part = "o" if matrix == "output" else matrix
    return f".layers.{layer}." in of_peft and f".{part}_proj.{kind}." in of_peft


def test_matrices_that_peft_has_no_place_for_are_refused() -> None:
    phi3 = shape_of(configuration("phi3"), "tiny")
    assert adapter_unsupported_reason(phi3, ALL) == (
        "lora.targets has q, for which Phi3ForCausalLM has no module of its own, so peft could not load the adapters; "
        "leave it out"
    )
    assert adapter_unsupported_reason(phi3, replace(ALL, targets=("output", "down"))) is None
    gpt_oss = shape_of(configuration("gpt-oss"), "tiny")
    assert "has down, for which GptOss" in str(adapter_unsupported_reason(gpt_oss, replace(ALL, targets=("down",))))
    assert adapter_unsupported_reason(gpt_oss, replace(ALL, targets=("q", "k", "v", "output"))) is None


def test_what_cannot_train_adapters_says_so_by_name() -> None:
    model = shape_of(configuration("llama 3"), "tiny")
    plain = replace(model, name="plain", gated=False)
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "burst": ("", {}),
        "ulysses": ("", {}),
        "megatron_lm_upstream": (
            "megatron_lm_upstream is a program that is given no adapters; leave lora out, or choose a method such",
            {},
        ),
        "torchtitan_upstream": (
            "torchtitan_upstream is a program that is given no adapters; leave lora out, or choose a method such",
            {},
        ),
        "megatron_tp": ("lora has no tensor parallelism, found tp_size 2; set it to 1", {"tp_size": 2}),
    }
    of_burst = {
        "lora is a setting of task train, found attention; leave it out": {"task": "attention"},
        "lora was tried with no other loss_kernel than own, found liger; set it to own": {"loss_kernel": "liger"},
        "lora.targets has gate, but the MLP of model plain has no gate; leave it out": {"model": plain},
    }
    given = [(name, *case) for name, case in cases.items()] + [("burst", *case) for case in of_burst.items()]
    for name, words, changes in given:
        values = {"task": "train", "method": name, "model": model, "seq_len": 64, "lora": ALL} | changes
        found = method_unsupported_reason(method_named(name), TrialSettings(**values))
        assert (found or "").startswith(words), name
        assert (found is None) == (words == ""), (name, found)
