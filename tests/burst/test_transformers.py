"""Models of transformers over a sharded sequence: loss, logits and every gradient are those of eager attention on one
device, in float64."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import burst
from burst.transformers import refuse_layers
from tests.ranks import run_on_ranks

transformers = pytest.importorskip("transformers", reason="the adapter is tested against it: extra `test` has it")

TINY: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "attention_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False,  # with a cache, transformers does not look for packed documents
}  # fmt: skip
LATENT: dict[str, Any] = {  # keys and values of all heads, with dims of their own; the second layer has experts
    "num_key_value_heads": 4, "head_dim": 6, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6, "v_head_dim": 10, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 3.1": ("LlamaConfig", {}),
    "qwen 2.5": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen 3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "gemma 2": ("Gemma2Config", {"sliding_window": 7, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}),
    "gemma 3": ("Gemma3TextConfig", {"sliding_window": 7, "query_pre_attn_scalar": 8}),
    "gpt-oss": ("GptOssConfig", {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 2}),
    "deepseek v3": ("DeepseekV3Config", LATENT),
}


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def model_of(name: str, attention: str, **changed: Any) -> Any:
    """The same weights in each call: random, but for those that begin as 0 or 1, which could hide a mistake."""
    kind, own = MODELS[name]
    config = getattr(transformers, kind)(**TINY | own | changed)
    config._experts_implementation = "eager"  # the others take no float64
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def batch(lengths: tuple[int, ...] = (24,), rows: int = 2) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 50, (rows, sum(lengths)), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 3:6] = -100
    positions = torch.cat([torch.arange(length) for length in lengths]).expand_as(tokens)
    labels[positions == 0] = -100
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def eager(name: str, lengths: tuple[int, ...]) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, logits, gradients) on one device, of one document after the other: with `position_ids` alone, transformers
    5.23 lets tokens of gpt-oss see other documents under eager attention."""
    model, whole, one = model_of(name, "eager"), batch(lengths), burst.ContextParallel.single()
    counted = burst.shard_batch(whole, one)["num_items_in_batch"]
    loss, logits = torch.zeros(()), []
    for start, length in zip(itertools.accumulate((0, *lengths)), lengths, strict=False):
        own = {key: tensor[:, start : start + length] for key, tensor in whole.items()}
        found = model(**burst.shard_batch(own, one) | {"num_items_in_batch": counted})
        loss = loss + found.loss
        logits.append(found.logits.detach())
    loss.backward()
    return loss.item(), torch.cat(logits, dim=1), gradients(model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def sharded(names: list[str], layout: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The same by `burst`, on the ranks that there are."""
    cp = burst.ContextParallel(layout=layout)
    burst.register(cp)
    results = {}
    for name in names:
        model = model_of(name, "burst")
        found = model(**burst.shard_batch(batch(lengths), cp))
        found.loss.backward()
        loss, own = found.loss.detach().clone(), gradients(model)
        for each in (loss, *own.values()):
            dist.all_reduce(each)
        logits = cp.unshard(found.logits.detach().contiguous())
        results[name] = (loss.item(), logits[:, : sum(lengths)].numpy(), {key: g.numpy() for key, g in own.items()})
    return results


@pytest.mark.parametrize(
    ("world_size", "layout", "lengths"), [(1, "zigzag", (24,)), (2, "zigzag", (24,)), (4, "contiguous", (1, 12, 3, 7))]
)
def test_loss_logits_and_gradients_are_those_of_one_device(
    world_size: int, layout: str, lengths: tuple[int, ...]
) -> None:
    found = run_on_ranks(world_size, sharded, list(MODELS), layout, lengths)[0]
    for name in MODELS:
        loss, logits, expected = eager(name, lengths)
        assert found[name][0] == pytest.approx(loss, rel=1e-6), name  # transformers forms the loss in float32
        # eager attention forms its softmax in float32
        assert (torch.from_numpy(found[name][1]) - logits).abs().max() < 2e-6, name
        assert expected.keys() == found[name][2].keys()
        for key, gradient in expected.items():
            error = (torch.from_numpy(found[name][2][key]) - gradient).abs().max() / (gradient.abs().max() + 1e-12)
            assert error < 1e-5, (name, key)


def weighted_log_probs(sharded: bool) -> tuple[Any, dict[str, Any]]:
    """Log-probabilities of each next token by the fused LM head, and gradients of a sum that weighs each of them; or
    what log_softmax of whole logits gives."""
    cp = burst.ContextParallel() if sharded else burst.ContextParallel.single()
    burst.register(cp)
    model, whole = model_of("llama 3.1", "burst"), batch((5, 14))
    seq_len = whole["input_ids"].shape[1]
    if sharded:
        part = burst.shard_batch(whole, cp)
        hidden = model.base_model(**part).last_hidden_state
        labels = part["shift_labels"]
        found = burst.fused_log_probs(hidden.flatten(0, 1), model.lm_head.weight, labels.flatten(), tiles=3)
        log_probs = cp.unshard(found.view(labels.shape), gradient="same")[:, : seq_len - 1]
    else:
        logits = model(whole["input_ids"], position_ids=whole["position_ids"]).logits[:, :-1]
        labels = whole["labels"][:, 1:]
        log_probs = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0].masked_fill(labels < 0, 0)
    (log_probs * torch.linspace(-1, 2, log_probs.numel()).view(log_probs.shape)).sum().backward()
    for each in gradients(model) if sharded else ():
        dist.all_reduce(model.get_parameter(each).grad)
    return log_probs.detach().numpy(), {name: each.numpy() for name, each in gradients(model).items()}


def test_log_probabilities_of_tokens_and_their_gradients_over_a_sharded_sequence() -> None:
    expected, expected_gradients = weighted_log_probs(sharded=False)
    found, found_gradients = run_on_ranks(2, weighted_log_probs, True)[1]
    assert abs(found - expected).max() < 1e-6
    for name, gradient in expected_gradients.items():
        assert abs(found_gradients[name] - gradient).max() < 1e-6 * abs(gradient).max() + 1e-9, name


def attend(cp: burst.ContextParallel, shape: tuple[int, int] = (1, 8), **passed: Any) -> torch.Tensor:
    """The registered function on random tensors of two heads, as a layer of a model would call it."""
    burst.register(cp)
    q, k, v = torch.randn(3, shape[0], 2, shape[1], 4).unbind()
    function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["burst"]
    module = torch.nn.Module()
    out: torch.Tensor = function(module, q, k, v, passed.pop("attention_mask", None), **passed)[0]
    return out


@pytest.mark.parametrize(
    ("passed", "sentence"),
    [
        ({"dropout": 0.1}, "attention has dropout 0.1; set attention_dropout to 0"),
        ({"attention_mask": torch.ones(1, 1, 8, 8)}, r"a mask of its own \(\[1, 1, 8, 8\]\)"),
        ({"position_bias": torch.ones(1)}, "passes position_bias to its attention"),
        ({"output_attentions": True}, "passes output_attentions to its attention"),
        ({"position_ids": torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10]])}, "first position is 3"),
        ({"position_ids": torch.tensor([[0, 1, 2, 4, 5, 6, 7, 8]])}, "position 4 follows 2 at token 3"),
        ({"position_ids": torch.arange(9)[None]}, r"position_ids are \[1, 9\]"),
        (
            {"position_ids": torch.arange(8)[None], "cu_seq_lens_q": torch.tensor([0, 4, 8])},
            r"cu_seq_lens_q \[0, 4, 8\]",
        ),
        ({"sliding_window": 4, "is_causal": False}, "a window to both sides"),
    ],
)
def test_what_is_not_exact_is_refused(passed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        attend(burst.ContextParallel.single(), **passed)


def test_rows_with_documents_of_their_own_and_flash_attentions_names() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 4]])
    torch.manual_seed(0)
    together = attend(burst.ContextParallel.single(), (2, 8), position_ids=positions)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 8, 4).unbind()
    seen = torch.ones(8, 8, dtype=torch.bool).tril() & torch.block_diag(torch.ones(3, 3), torch.ones(5, 5)).bool()
    dense = torch.nn.functional.scaled_dot_product_attention
    for row, mask in enumerate((torch.ones(8, 8, dtype=torch.bool).tril(), seen)):
        alone = dense(q[row], k[row], v[row], attn_mask=mask)
        assert (together[row] - alone.transpose(0, 1)).abs().max() < 1e-6
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    assert {functions[f"flash_attention_{version}"] for version in (2, 3, 4)} == {functions["burst"]}


def test_autocast_is_heeded_as_attention_of_torch_heeds_it() -> None:
    """Rotary embedding leaves queries and keys in float32 there, and values are in bfloat16."""
    cp = burst.ContextParallel.single()
    burst.register(cp)
    losses = {}
    for name in ("eager", "burst"):
        with torch.autocast("cpu", torch.bfloat16):
            model = model_of("llama 3.1", name).float()
            losses[name] = model(**batch()).loss
            losses[name].backward()
        assert all(each.grad.isfinite().all() for each in model.parameters())
    assert losses["burst"].item() == pytest.approx(losses["eager"].item(), rel=1e-2)


def refused(layout: str) -> dict[str, str]:
    """The errors on two ranks for different batches, positions counted per rank, padding on the left, and a cache."""
    cp = burst.ContextParallel(layout=layout)
    burst.register(cp)
    model = model_of("llama 3.1", "burst")
    whole = batch()
    rotated = model_of("llama 3.1", "burst", rope_parameters=dict(DYNAMIC), max_position_embeddings=20)
    rotated(**burst.shard_batch(batch((20, 4)), cp))  # no longer than trained
    sharded_batch = burst.shard_batch(whole, cp)
    left = torch.ones_like(whole["input_ids"])
    left[0, :3] = 0
    other = whole | {"labels": whole["labels"].clone()}
    other["labels"][1, 8 + cp.rank] = -100
    cases: dict[str, dict[str, Any]] = {
        "batches": burst.shard_batch(other, cp),
        "counted": {"input_ids": sharded_batch["input_ids"]},
        "left": {**sharded_batch, "attention_mask": cp.shard(left)},
        "layout": {**sharded_batch, "position_ids": sharded_batch["position_ids"].flip(1)},
    }
    told = {}
    with pytest.raises(ValueError, match=r".") as caught:
        rotated(**sharded_batch)
    told["rotation"] = str(caught.value)
    for name, inputs in cases.items():
        with pytest.raises(ValueError, match=r".") as caught:
            model(**inputs)
        told[name] = str(caught.value)
    for tokens in (3, 4):  # a number that the layout may not divide, and one that it does
        with pytest.raises(ValueError, match=r".") as caught:
            model.generate(whole["input_ids"][:, :tokens], max_new_tokens=2)
        told[f"generate {tokens}"] = str(caught.value)
    return told


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_ranks_are_told_of_batches_positions_padding_and_caches(layout: str) -> None:
    told = run_on_ranks(2, refused, layout)[0]
    assert "the 2 ranks that share a sequence have different batches" in told["batches"]
    assert "0 to 11 on all 2 ranks, as a model counts them" in told["counted"]
    assert "pad on the right" in told["left"]
    assert "first position is" in told["layout"]
    assert "longest position beyond 20, which here is 23" in told["rotation"]
    assert all("Before generate, call model.set_attn" in told[f"generate {tokens}"] for tokens in (3, 4))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package `kernels`: transformers finds it, and a kernel of any name."""
    hub = transformers.integrations.hub_kernels
    kernel = SimpleNamespace(flash_attn_func=print, flash_attn_varlen_func=print)
    monkeypatch.setattr(hub, "get_kernel_hub", lambda *_, **__: kernel, raising=False)
    for module in (hub, transformers.modeling_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda: True)
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("eager", "eager"),
        ("sdpa", "sdpa"),
        ("flash_attention_2", "kernels-community/flash-attn2"),
        ("flash_attention_3", "kernels-community/vllm-flash-attn3"),
        ("flash_attention_4", "kernels-community/flash-attn4"),
    ],
)
def test_attention_of_one_rank_refuses_a_sharded_batch_and_computes_others(
    kernels: None, asked: str, found: str
) -> None:
    model = model_of("llama 3.1", "sdpa")
    model.set_attn_implementation(asked)
    alone = burst.ContextParallel.single()
    if found == asked:
        expected = model(**burst.shard_batch(batch(), alone)).loss
    burst.register(alone)
    two = copy.copy(alone)
    two.size = 2
    with pytest.raises(ValueError, match=f"attention was set to {found}, which sees the tokens of one rank"):
        model(**burst.shard_batch(batch(), two))
    if found == asked:
        assert torch.equal(model(**burst.shard_batch(batch(), alone)).loss, expected)


SHAPE = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}


def test_labels_of_a_sharded_batch_are_not_shifted_once_more() -> None:
    alone = burst.ContextParallel.single()
    burst.register(alone)
    model, part = model_of("llama 3.1", "burst"), burst.shard_batch(batch(), alone)
    part.pop("shift_labels")
    with pytest.raises(ValueError, match=r"labels are those of shard_batch, shifted before, .* pass it all that"):
        model(**part)
    part.pop("labels")
    assert model(**part).loss is None
    assert model(**part, labels=batch()["labels"]).loss > 0
    # A part of several ranks is known by its checksum, also where a copy has lost the labels' own mark.
    part = {key: each.clone() for key, each in burst.shard_batch(batch(), alone).items()} | {
        "batch_checksum": torch.tensor(0)
    }
    for name, sentence in (
        ("shift_labels", "labels are those of shard_batch, shifted before"),
        ("num_items_in_batch", "come without num_items_in_batch, .* mean over this rank's own tokens; pass the model"),
    ):
        with pytest.raises(ValueError, match=sentence):
            model(**{key: each for key, each in part.items() if key != name})


def test_a_model_that_takes_one_token_of_a_sequence_is_refused() -> None:
    config = transformers.LlamaConfig(**SHAPE, num_labels=2, intermediate_size=32, num_attention_heads=2)
    burst.register(burst.ContextParallel.single())
    model = transformers.LlamaForSequenceClassification._from_config(config, attn_implementation="burst")
    tokens = {"input_ids": torch.ones(1, 4, dtype=torch.long), "position_ids": torch.arange(4)[None]}
    with pytest.raises(ValueError, match="LlamaForSequenceClassification takes one token of each sequence"):
        model(**tokens, batch_checksum=torch.tensor(0))


def test_a_compiled_model_gives_the_loss_and_gradients_of_an_eager_one() -> None:
    alone = burst.ContextParallel.single()
    burst.register(alone)
    found = []
    for compiles in (False, True):
        model, losses = model_of("llama 3.1", "burst", num_hidden_layers=1), []
        call = torch.compile(model, backend="eager") if compiles else model
        for lengths in ((24,), (9, 10)):
            whole = batch(lengths)
            whole["position_ids"] = torch.stack((whole["position_ids"][0], torch.arange(sum(lengths))))  # rows differ
            (loss := call(**burst.shard_batch(whole, alone)).loss).backward()
            losses.append(loss.item())
        found.append((losses, gradients(model)))
    (eager_losses, expected), (losses, own) = found
    assert losses == pytest.approx(eager_losses)
    for name, gradient in expected.items():
        torch.testing.assert_close(own[name], gradient, msg=name)


def losses_of_a_buffer() -> list[list[float]]:
    """Losses of two batches whose positions are written into one tensor, and of the same in tensors of their own."""
    cp = burst.ContextParallel()
    burst.register(cp)
    model, buffer = model_of("llama 3.1", "burst"), torch.empty(2, 24 // cp.size, dtype=torch.int64)
    parts = [burst.shard_batch(batch(lengths), cp) for lengths in ((24,), (9, 15))]
    written = []
    for part in parts:
        np.copyto(buffer.numpy(), part["position_ids"].numpy())  # as by `dist.broadcast`, without a new version
        written.append(model(**part | {"position_ids": buffer}).loss.item())
    return [written, [model(**part).loss.item() for part in parts]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_positions_that_are_written_into_one_tensor_are_read_in_every_forward(ranks: int) -> None:
    for written, own in run_on_ranks(ranks, losses_of_a_buffer):
        assert written == own


STATES = "which need tokens of all ranks; take a model of attention alone"


@pytest.mark.parametrize(
    ("kind", "own", "sentence"),
    [
        ("FalconConfig", {"num_attention_heads": 4}, "FalconForCausalLM has attention of its own, which transformers"),
        (
            "Mamba2Config",
            {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "expand": 2, "chunk_size": 8},
            f"Mamba2ForCausalLM has layers of type linear_attention, {STATES}",
        ),
        (
            "Lfm2Config",
            {"layer_types": ["conv", "full_attention"], "num_attention_heads": 4, "num_key_value_heads": 2},
            f"Lfm2ForCausalLM has layers of type conv, {STATES}",
        ),
        ("xLSTMConfig", {}, f"xLSTMForCausalLM has layers with a state, {STATES}"),
        (
            "MixtralConfig",
            TINY | {"num_local_experts": 2, "output_router_logits": True},
            "output_router_logits is set, and the loss that balances experts is no sum over tokens",
        ),
        (
            "BartConfig",
            {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 32, "dropout": 0.0},
            "BartForCausalLM takes no position_ids and would count positions from 0 on each rank",
        ),
    ],
)
def test_models_that_a_rank_cannot_compute_from_its_own_tokens_are_refused(
    kind: str, own: dict[str, Any], sentence: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**SHAPE | own))
    alone = burst.ContextParallel.single()
    burst.register(alone)
    two = copy.copy(alone)
    two.size = 2
    with pytest.raises(ValueError, match=sentence):
        model(**burst.shard_batch(batch(), two))
    assert model(**burst.shard_batch(batch(), alone), use_cache=False).loss > 0


def test_subclasses_without_readable_source_and_experts_without_a_balancing_loss_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: dict[str, Any] = {"Base": transformers.MixtralForCausalLM, "__name__": "a_notebook"}
    exec("class Mine(Base): pass", written)  # transformers finds no source to look for attention in
    answer = "_can_set_attn_implementation_cached_value"
    for kind in written["Mine"].__mro__:
        if answer in vars(kind):  # of before
            monkeypatch.delattr(kind, answer)
    config = transformers.MixtralConfig(
        **TINY, num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.0
    )
    model = written["Mine"](config)
    assert not type(model)._can_set_attn_implementation()
    refuse_layers(model)
    refuse_layers(model, router_logits=True)


def in_lower_precision(attention: str) -> list[tuple[float, float]]:
    """(loss, magnitude of all gradients) of models with float32 weights under autocast; without gradients, the loss in
    inference mode."""
    cp = burst.ContextParallel() if attention == "burst" else burst.ContextParallel.single()
    burst.register(cp)
    found = []
    for name in ("llama 3.1", "gpt-oss"):
        model = model_of(name, attention).float()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**burst.shard_batch(batch((16, 7)), cp)).loss
            with torch.inference_mode():
                again = model(**burst.shard_batch(batch((16, 7)), cp)).loss.clone()
        loss.backward()
        results = [loss.detach(), again, *gradients(model).values()]
        for each in results if attention == "burst" else ():
            dist.all_reduce(each)
        assert results[0] == results[1]
        found.append((results[0].item(), sum(each.abs().sum().item() for each in results[2:])))
    return found


def test_autocast_and_inference_mode() -> None:
    for found, expected in zip(
        run_on_ranks(2, in_lower_precision, "burst")[0], in_lower_precision("eager"), strict=True
    ):
        assert found == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"pixel_values": torch.ones(1, 8)}, "the batch has pixel_values"),
        ({"labels": torch.ones(1, 7, dtype=torch.long)}, r"labels is \[1, 7\] and input_ids \[1, 8\]"),
        ({"labels": None}, "labels is a NoneType"),
        ({"position_ids": torch.arange(8.0)[None]}, "position_ids is torch.float32"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1]])}, "padding between tokens"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2, 2, 0]])}, "values from 0 to 2"),
        ({"attention_mask": torch.tensor([[0, 0, 0, 0, 0, 0, 0, -1e9]])}, "values from -1000000000.0 to 0"),
        (
            {"labels": torch.ones(1, 8, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])},
            "of a packed document, has a label",
        ),
    ],
)
def test_batches_that_cannot_be_cut(changed: dict[str, torch.Tensor], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        burst.shard_batch({"input_ids": torch.ones(1, 8, dtype=torch.long)} | changed, burst.ContextParallel.single())


@pytest.mark.parametrize(("given", "name"), [(torch.ones(1, 8).long(), "Tensor"), ([1, 2], "list"), ("ab", "str")])
def test_a_batch_that_is_no_dict_is_refused(given: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^the batch is a {name}; give a dict with input_ids of \[batch, tokens\]$"):
        burst.shard_batch(given, burst.ContextParallel.single())
    with pytest.raises(ValueError, match=r"^the batch has 1, which is not known how to cut; pass input_ids"):
        burst.shard_batch({1: given}, burst.ContextParallel.single())  # type: ignore[dict-item]


def test_labels_are_shifted_before_the_sequence_is_cut_and_padding_has_none() -> None:
    tokens = torch.arange(10, 18)[None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    labels = tokens.masked_fill(positions == 0, -100)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0]])
    found = burst.shard_batch(
        {"input_ids": tokens, "labels": labels, "position_ids": positions, "attention_mask": mask},
        burst.ContextParallel.single(),
    )
    assert found["shift_labels"].tolist() == [[11, 12, -100, 14, 15, -100, -100, -100]]
    assert found["num_items_in_batch"] == 4
