"""Megatron Core's GPT over sequences that context-parallel ranks share: loss and every gradient are those of one rank
with Megatron's own attention, in float64."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import burst
from engine.attention.geometry.layout import ZigzagOfDocuments
from tests.ranks import run_on_ranks

pytest.importorskip("megatron.core", reason="the adapter is tested against megatron-core 0.16.1: extra `test` has it")

import burst.megatron

VOCABULARY, SEQ_LEN, BATCH = 40, 24, 2
# name: (settings of the model, lengths of packed documents)
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "causal": ({}, ()),
    "grouped heads and a window in layer 1": (
        {"num_query_groups": 2, "window_size": (6, 0), "window_attn_skip_freq": [1, 0]}, (),
    ),
    "learned sinks": ({"softmax_type": "learnable"}, ()),
    "a sink of score 0": ({"softmax_type": "off-by-one"}, ()),
    "packed documents": ({"num_query_groups": 2}, (8, 16)),
    "all-to-all": ({"cp_comm_type": "a2a"}, ()),
    "matrices over two ranks": (
        {"tensor_model_parallel_size": 2, "num_query_groups": 2, "softmax_type": "learnable"}, (),
    ),
}  # fmt: skip


class TorchWithoutGpu:
    """torch for modules of Megatron that name a GPU: tensors are made on the CPU."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("tensor", "ones"):
            return found
        return lambda *args, device=None, pin_memory=False, **settings: found(*args, **settings)


def build(own: dict[str, Any], ranks: int, sharded: bool) -> Any:
    """The same weights in each call. Megatron asks for the current GPU where it makes tables and sinks."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[method-assign,assignment,return-value]
    torch.Tensor.cuda = lambda tensor, **_: tensor  # type: ignore[method-assign,assignment]
    rope_utils.torch = utils.torch = TorchWithoutGpu()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(own.get("tensor_model_parallel_size", 1), context_parallel_size=ranks)
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # the one that needs no GPU
    settings = {
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "kv_channels": 8,
        "context_parallel_size": ranks, "use_cpu_initialization": True, "params_dtype": torch.float64,
        "pipeline_dtype": torch.float64, "normalization": "RMSNorm", "add_bias_linear": False, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "bias_dropout_fusion": False, "masked_softmax_fusion": False,
        "persist_layer_norm": False, "apply_rope_fusion": False,
    } | own  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        TransformerConfig(**settings), burst.megatron.sharded(spec) if sharded else spec, vocab_size=VOCABULARY,
        max_sequence_length=SEQ_LEN, position_embedding_type="rope", share_embeddings_and_output_weights=False,
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQ_LEN + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": (torch.rand(BATCH, SEQ_LEN, generator=generator) > 0.2).double(),
        "position_ids": torch.arange(SEQ_LEN).expand(BATCH, -1),
        "attention_mask": torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).triu(1)[None, None],
    }


def loss_of(model: Any, part: dict[str, Any], packed: Any = None) -> torch.Tensor:
    per_token = model(
        part["tokens"], part["position_ids"], part["attention_mask"], labels=part["labels"], packed_seq_params=packed
    )
    loss: torch.Tensor = (per_token * part["loss_mask"]).sum()
    return loss


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def on_one_rank(names: list[str]) -> dict[str, tuple[float, dict[str, Any]]]:
    """Megatron's own attention; packed documents, which it has not on a CPU, one after the other."""
    results = {}
    for name in names:
        own, lengths = CASES[name]
        model = build({key: value for key, value in own.items() if key != "cp_comm_type"}, 1, sharded=False)
        whole, start = batch(), 0
        if not lengths:
            loss = loss_of(model, whole)
        else:
            loss = torch.zeros(())
            for length in lengths:
                part = {key: each[:1, start : start + length] for key, each in whole.items() if key != "attention_mask"}
                part["attention_mask"] = whole["attention_mask"][:, :, :length, :length]
                part["position_ids"] = part["position_ids"] - start
                loss, start = loss + loss_of(model, part), start + length
        loss.backward()
        results[name] = loss.item(), {key: each.numpy() for key, each in gradients(model).items()}
    return results


def on_many_ranks(names: list[str]) -> dict[str, tuple[float, dict[str, Any]]]:
    """Sums over the ranks, with batches cut by Megatron; packed ones, which it cuts on GPUs alone, by our layout."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.utils import get_batch_on_this_cp_rank

    results = {}
    for name in names:
        own, lengths = CASES[name]
        model = build(own, dist.get_world_size() // own.get("tensor_model_parallel_size", 1), sharded=True)
        group = parallel_state.get_context_parallel_group()
        if not lengths:
            loss = loss_of(model, get_batch_on_this_cp_rank(batch(), group))
        else:
            cp = burst.ContextParallel(group, layout=ZigzagOfDocuments(lengths))
            part = {key: cp.shard(each[:1]) for key, each in batch().items() if key != "attention_mask"}
            bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            loss = loss_of(
                model, part | {"attention_mask": None},
                PackedSeqParams("thd", bounds, bounds, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)),
            )  # fmt: skip
        loss.backward()
        own_gradients = gradients(model)
        total = loss.detach().clone()
        for each in (total, *own_gradients.values()):
            dist.all_reduce(each, group=group)
        results[name] = total.item(), {key: each.numpy() for key, each in own_gradients.items()}
    return results


def both(names: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    return on_one_rank(names), on_many_ranks(names)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, [name for name in CASES if name != "matrices over two ranks"]),
        pytest.param(4, ["causal", "learned sinks", "matrices over two ranks"], marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_megatron_on_one_rank(ranks: int, names: list[str]) -> None:
    for expected, found in run_on_ranks(ranks, both, names):
        compare(expected, found)


def compare(expected: dict[str, Any], found: dict[str, Any]) -> None:
    for name in expected:
        assert found[name][0] == pytest.approx(expected[name][0], rel=1e-6), name  # Megatron's loss is in float32
        assert found[name][1].keys() == expected[name][1].keys()
        for key, gradient in expected[name][1].items():
            error = abs(found[name][1][key] - gradient).max() / (abs(gradient).max() + 1e-12)
            assert error < 1e-5, (name, key, error)


def attention(own: dict[str, Any] | None = None, **built: Any) -> Any:
    """The module that fills the slot, of two heads of 4 on one rank."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {"attention_dropout": 0.0, "use_cpu_initialization": True} | (own or {})
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **settings)
    built = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self", "pg_collection": ALONE} | built
    return burst.megatron.BurstCoreAttention(config, 1, **built)


ONE = SimpleNamespace(size=lambda: 1)
ALONE = SimpleNamespace(tp=ONE, cp=None)


@pytest.mark.parametrize(
    ("own", "built", "sentence"),
    [
        ({"attention_dropout": 0.1}, {}, "attention has dropout 0.1"),
        ({"qk_clip": True}, {}, "asks for qk_clip"),
        ({}, {"attention_type": "cross"}, "cross-attention; only self-attention"),
        ({}, {"cp_comm_type": "ring"}, "cp_comm_type is 'ring'; choose p2p, all_gather"),
        (
            {"context_parallel_size": 4},
            {"pg_collection": SimpleNamespace(tp=ONE, cp=ONE)},
            "context_parallel_size is 4 and the group of ranks has 1",
        ),
    ],
)
def test_layers_that_are_not_exact_are_refused(own: dict[str, Any], built: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        attention(own, **built)


@pytest.mark.parametrize(
    ("own", "passed", "sentence"),
    [
        ({}, {"attention_bias": torch.ones(1)}, "attention has a bias"),
        ({}, {"x": 1}, "attention has x"),
        ({}, {"attention_mask": torch.zeros(1, 1, 8, 8, dtype=torch.bool)}, "is not the causal mask of 8 tokens"),
        ({}, {"attention_mask": torch.zeros(1, 1, 1, 8, dtype=torch.bool)}, "is not the causal mask of 8 tokens"),
        ({}, {"kind": "padding"}, "a mask of type padding"),
        ({"window_size": (4, 2)}, {}, r"window_size \(4, 2\) and is causal"),
        ({"window_size": (4, -1)}, {"kind": "no_mask"}, "is not causal; only"),
        ({}, {"packed": {"qkv_format": "sbhd"}}, "have format sbhd"),
        ({}, {"packed": {"local_cp_size": 2}}, "a group of ranks of their own"),
        ({}, {"packed": {"cu_seqlens_q": None}}, "have format thd and no cu_seqlens_q; give the boundaries"),
        ({}, {"packed": {"cu_seqlens_kv": torch.tensor([0, 4, 8])}}, "of queries and of keys differ"),
        ({}, {"packed": {"cu_seqlens_q_padded": torch.tensor([0, 4, 8])}, "kind": "no_mask"}, "documents are padded"),
        ({}, {"packed": {}, "attention_mask": torch.ones(1)}, "comes with an attention_mask"),
    ],
)
def test_calls_that_are_not_exact_are_refused(own: dict[str, Any], passed: dict[str, Any], sentence: str) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    attend = attention(own)
    if (packed := passed.pop("packed", None)) is not None:
        bounds = torch.tensor([0, 3, 8])
        passed["packed_seq_params"] = PackedSeqParams(**{"qkv_format": "thd", "cu_seqlens_q": bounds} | packed)
    q, k, v = torch.randn(3, 8, 1, 2, 4)
    mask = passed.pop("attention_mask", None)
    with pytest.raises(ValueError, match=sentence):
        attend(q, k, v, mask, attn_mask_type=AttnMaskType[passed.pop("kind", "causal")], **passed)


def test_values_of_latent_attention_may_have_fewer_channels() -> None:
    q, k = torch.randn(2, 8, 2, 2, 12, dtype=torch.float64)
    v = torch.randn(8, 2, 2, 8, dtype=torch.float64, requires_grad=True)
    found = attention(softmax_scale=0.3, k_channels=12, v_channels=8)(q, k, v, None)
    heads_first = (each.permute(1, 2, 0, 3) for each in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.3)
    assert (found - expected.permute(2, 0, 1, 3).flatten(2)).abs().max() < 1e-12


def test_specs_without_known_attention_are_refused() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_mlp_module_spec

    with pytest.raises(ValueError, match="has no slot core_attention"):
        burst.megatron.sharded(get_mlp_module_spec(use_te=False))
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = torch.nn.Identity
    with pytest.raises(ValueError, match="has Identity as core_attention"):
        burst.megatron.sharded(spec)


def told_of_a_mask() -> str:
    """The error on each rank when the mask of one rank's token hides a key that a causal mask does not."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    model, whole = build({}, 2, sharded=True), batch()
    whole["attention_mask"][0, 0, -1, 0] = True
    with pytest.raises(ValueError, match=r".") as caught:
        loss_of(model, get_batch_on_this_cp_rank(whole))
    return str(caught.value)


def sinks_in_a_checkpoint() -> dict[str, tuple[int, ...]]:
    """Of each learned sink, its shape over all ranks in Megatron's distributed checkpoint."""
    from megatron.core import parallel_state

    model = build({"softmax_type": "learnable", "tensor_model_parallel_size": 2}, 1, sharded=True)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    return {name: each.global_shape for name, each in state.items() if "softmax_offset" in name}


@pytest.mark.slow
def test_learned_sinks_are_in_checkpoints_divided_by_heads() -> None:
    found = run_on_ranks(2, sinks_in_a_checkpoint)[0]
    assert set(found.values()) == {(2, 4)}  # layers, heads of both ranks


@pytest.mark.slow
def test_all_ranks_refuse_a_mask_that_differs_on_one() -> None:
    told = run_on_ranks(2, told_of_a_mask)
    assert all("is not the causal mask of 24 tokens, on this rank or another" in each for each in told)
