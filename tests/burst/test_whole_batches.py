"""Models that take whole batches return, on each rank, what one device computes of them, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import burst
from burst.whole_batches import take_whole_batches, with_logits
from tests.burst.programs import llama
from tests.ranks import run_on_ranks

transformers = pytest.importorskip("transformers", reason="its models are tested: extra `test` has it")


def padded(side: str) -> dict[str, torch.Tensor]:
    """Rows of 19 tokens and fewer, with padding on one side or both; no label where padding would foretell a token."""
    tokens = torch.randint(4, 60, (3, 19), generator=torch.Generator().manual_seed(2))
    first, last = {"right": ((0, 0, 0), (19, 12, 5)), "both": ((4, 0, 7), (16, 19, 18))}[side]
    real = torch.stack([(torch.arange(19) >= a) & (torch.arange(19) < b) for a, b in zip(first, last, strict=True)])
    starts = torch.tensor(first)[:, None] == torch.arange(19)
    return {"input_ids": tokens, "attention_mask": real.long(), "labels": tokens.masked_fill(~real | starts, -100)}


def gradients(model: Any) -> dict[str, Any]:
    return {name: None if each.grad is None else each.grad.numpy() for name, each in model.named_parameters()}


def computed(side: str, adapted: bool, folder: str) -> tuple[float, Any, dict[str, Any]]:
    """(loss, logits, mean of the ranks' gradients). An adapter is saved by the first rank."""
    model = llama().double()
    if adapted:
        import peft

        torch.manual_seed(3)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"])).double()
        with torch.no_grad():  # B begins as 0, which would hide gradients of A
            for each in model.parameters():
                each.add_(torch.randn_like(each) * each.requires_grad, alpha=0.1)
    if dist.get_world_size() > 1:
        take_whole_batches(model, burst.ContextParallel())
    with with_logits(model):
        found = model(**padded(side))
    found.loss.backward()
    for each in model.parameters():
        if each.grad is not None:
            dist.all_reduce(each.grad)
            each.grad /= dist.get_world_size()
    if adapted and dist.get_rank() == 0:
        model.save_pretrained(folder)
    return found.loss.item(), found.logits.detach().numpy(), gradients(model)


@pytest.mark.parametrize(("side", "adapted"), [("right", True), ("both", False)])
def test_loss_logits_and_gradients_are_those_of_one_device(side: str, adapted: bool, tmp_path: Path) -> None:
    if adapted:
        peft = pytest.importorskip("peft", reason="adapters are its own: pip install peft")
    expected, found = (run_on_ranks(ranks, computed, side, adapted, str(tmp_path))[0] for ranks in (1, 2))
    real = padded(side)["attention_mask"].bool()
    assert found[0] == pytest.approx(expected[0], rel=1e-6)  # transformers forms the loss in float32
    assert abs(found[1] - expected[1])[real].max() < 1e-6
    for name, gradient in expected[2].items():
        if gradient is None:
            assert found[2][name] is None, name
        else:
            assert abs(found[2][name] - gradient).max() < 1e-5 * (abs(gradient).max() + 1e-9), name
    frozen = [name for name, gradient in found[2].items() if gradient is None]
    assert bool(frozen) == adapted
    assert not any("lora" in name for name in frozen)
    if adapted:
        loaded = peft.PeftModel.from_pretrained(llama(), str(tmp_path)).double()
        logits = loaded.merge_and_unload()(**padded(side)).logits
        assert abs(logits.detach().numpy() - expected[1])[real].max() < 1e-5


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"input_ids": torch.ones(1, 8, dtype=torch.long), "pixel_values": torch.ones(1)}, "given pixel_values"),
        ({"input_ids": torch.ones(1, 8, dtype=torch.long), "use_cache": True}, "given use_cache"),
        (
            padded("both") | {"labels": padded("both")["input_ids"]},
            "first token after padding, or of a packed document, has a label",
        ),
        (
            {"input_ids": torch.ones(1, 4, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 0, 1]])}
            | {"cu_seq_lens_q": torch.tensor([0, 3, 4])},
            r"cu_seq_lens_q \[0, 3, 4\] is not where",
        ),
    ],
)
def test_inputs_that_are_not_cut_are_refused(given: dict[str, Any], sentence: str) -> None:
    model = llama()
    take_whole_batches(model, burst.ContextParallel.single())
    with pytest.raises(ValueError, match=sentence):
        model(**given)


def test_results_without_names_are_refused() -> None:
    model = llama()
    take_whole_batches(model, burst.ContextParallel.single())
    with pytest.raises(ValueError, match=r"return_dict is False, .*; leave return_dict at its default"):
        model(input_ids=torch.ones(1, 8, dtype=torch.long), return_dict=False)


def test_attention_that_was_set_anew_is_refused() -> None:
    model = llama()
    take_whole_batches(model, burst.ContextParallel.single())
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attention was set to sdpa, which sees the tokens of one rank"):
        model(input_ids=torch.ones(1, 8, dtype=torch.long))


def test_models_whose_layers_depend_on_tokens_of_other_ranks_are_refused() -> None:
    model = llama(layer_types=["full_attention", "linear_attention"])
    with pytest.raises(ValueError, match="layers of type linear_attention"):
        take_whole_batches(model, burst.ContextParallel.single())
    with pytest.raises(ValueError, match="has is_causal False, and tokens would see the padding"):
        take_whole_batches(llama(is_causal=False), burst.ContextParallel.single())
    with pytest.raises(ValueError, match="no causal language model"):
        take_whole_batches(torch.nn.Linear(2, 2), burst.ContextParallel.single())


def test_adapters_of_prompts_are_refused() -> None:
    peft = pytest.importorskip("peft", reason="adapters are its own: pip install peft")
    model = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="adapter default is PROMPT_TUNING"):
        take_whole_batches(model, burst.ContextParallel.single())


def generated() -> list[int]:
    """Greedy tokens of a model that takes whole batches, which is trained on afterwards as before."""
    model = llama()
    take_whole_batches(model, burst.ContextParallel())
    prompt = torch.arange(4, 11)[None]
    before = model(input_ids=prompt, labels=prompt).loss
    tokens = model.generate(prompt, max_new_tokens=5, do_sample=False)[0].tolist()
    assert torch.equal(model(input_ids=prompt, labels=prompt).loss, before)
    return list(tokens)


def test_generate_works_on_whole_sequences() -> None:
    alone = llama().generate(torch.arange(4, 11)[None], max_new_tokens=5, do_sample=False)[0].tolist()
    assert run_on_ranks(2, generated) == [alone, alone]
