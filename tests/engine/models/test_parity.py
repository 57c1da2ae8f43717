"""Every architecture computes what transformers computes: logits, loss, gradients and tokens, imported and exported,
on one device and on several ranks. Both compute in float64, so a difference is one of mathematics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.masks import parse_mask
from engine.hf import export_hugging_face, import_hugging_face
from engine.models.architecture import shape_under
from engine.models.decoder import Decoder, DenseAttention
from harness.spec.models import named_model
from tests.engine.models.architectures import CASES, EAGER, LABELS, TOKENS, oracle, tensors_in
from tests.engine.models.float64 import in_float64

transformers = pytest.importorskip("transformers", reason="the oracle, transformers, is not installed: extra `test`")

EACH = pytest.mark.parametrize("name", CASES)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
GENERATED = 6  # tokens


def imported(directory: Path) -> Decoder:
    shape, tensors = import_hugging_face(directory)
    model = Decoder(shape).double()
    model.load_state_dict({name: tensor.double() for name, tensor in tensors})
    return model


def logits(model: Decoder, tokens_BL: Tensor) -> Tensor:
    return model(tokens_BL, torch.arange(tokens_BL.shape[1]))


def exported(state: dict[str, Tensor], model: Decoder, directory: Path) -> Path:
    return export_hugging_face(state, model.shape, directory, dtype=torch.float64)


def in_their_names(gradients: dict[str, Tensor], model: Decoder, directory: Path) -> dict[str, Tensor]:
    """Gradients by the names, and in the form, of transformers. A stored tensor is linear in ours up to a constant."""
    zeros = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    constant = tensors_in(exported(zeros, model, directory / "zeros"))
    return {
        name: tensor - constant[name]
        for name, tensor in tensors_in(exported(gradients, model, directory / "gradients")).items()
    }


@EACH
def test_logits_loss_gradients_and_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    with in_float64():
        theirs = oracle(name)
        theirs.save_pretrained(tmp_path / "theirs")
        expected = theirs(TOKENS).logits
        F.cross_entropy(expected.flatten(0, 1), LABELS.flatten(), reduction="sum").backward()
        prompt = TOKENS[:, :7]
        theirs_next = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=GENERATED, do_sample=False, use_cache=False
        )
    model = imported(tmp_path / "theirs")
    torch.testing.assert_close(logits(model, TOKENS), expected, **CLOSE)

    loss = model(TOKENS, torch.arange(TOKENS.shape[1]), LABELS)
    torch.testing.assert_close(
        loss, F.cross_entropy(expected.flatten(0, 1), LABELS.flatten(), reduction="sum"), **CLOSE
    )
    loss.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert all(gradient is not None and gradient.norm() > 0 for gradient in gradients.values())
    found = in_their_names(gradients, model, tmp_path)
    for key, parameter in theirs.named_parameters():
        key = key if key in found else key.replace("model.", "backbone.", 1)  # they rename what they save
        torch.testing.assert_close(found[key], parameter.grad, **CLOSE, msg=lambda text, key=key: f"{key}: {text}")

    tokens = prompt
    for _ in range(GENERATED):
        tokens = torch.cat([tokens, logits(model, tokens)[:, -1:].argmax(-1)], 1)
    assert torch.equal(tokens, theirs_next)


@EACH
def test_transformers_loads_an_export_whole_with_the_same_logits(name: str, tmp_path: Path) -> None:
    with in_float64():
        oracle(name).save_pretrained(tmp_path / "theirs")
    model = imported(tmp_path / "theirs")
    with torch.no_grad():
        for parameter in model.parameters():  # no tensor is the one that was imported
            parameter.mul_(0.9).add_(0.01)
    directory = exported(model.state_dict(), model, tmp_path / "ours")
    with in_float64():
        loaded, loading = transformers.AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, output_loading_info=True, dtype=torch.float64, **EAGER
        )
        assert [len(loading[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [0, 0, 0]
        expected = loaded.eval()(TOKENS).logits
    torch.testing.assert_close(logits(model, TOKENS), expected, **CLOSE)
    again, _tensors = import_hugging_face(directory)
    assert again.name == "ours"
    assert {**vars_of(again), "name": ""} == {**vars_of(model.shape), "name": ""}


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "phi3, half of each head rotated"])
def test_a_model_trained_under_a_window_is_exported_with_it(name: str, tmp_path: Path) -> None:
    with in_float64():
        oracle(name).save_pretrained(tmp_path / "theirs")
    model = imported(tmp_path / "theirs")
    model.shape = replace(model.shape, window=0)
    for block in model.blocks:
        block.attend = DenseAttention(parse_mask("sliding_window:3"))
    shape = shape_under("sliding_window:3", model.shape)
    assert shape is not None
    directory = export_hugging_face(model.state_dict(), shape, tmp_path / "ours", dtype=torch.float64)
    with in_float64():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, dtype=torch.float64, **EAGER
        )
        expected = loaded.eval()(TOKENS).logits
    torch.testing.assert_close(logits(model, TOKENS), expected, **CLOSE)


def test_masks_that_an_architecture_does_not_have_are_known() -> None:
    llama, mistral, window = (
        replace(named_model("tiny"), architecture=name, window=size)
        for name, size in (("llama", 0), ("mistral", 0), ("mistral", 8))
    )
    for causal in ("causal", "documents", "documents:4,28", "documents:4,..."):
        assert all(shape_under(causal, shape) == shape for shape in (llama, mistral, window))
    for inside in ("sliding_window:7", "documents:left-7", "documents:16,16:left-7"):
        assert [shape_under(inside, shape) for shape in (llama, mistral, window)] == [None, window, window]
    other = ("full", "sliding_window:7:1", "sliding_window:7:0:2", "documents:16,16:full", "documents:32:spans-2-5")
    for mask in (*other, "block_sparse:16:10/11:causal"):
        assert shape_under(mask, mistral) is None, mask


def vars_of(shape: object) -> dict[str, object]:
    return {name: getattr(shape, name) for name in type(shape).__dataclass_fields__}
