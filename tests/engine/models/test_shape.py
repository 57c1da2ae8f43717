"""What follows from the features of a shape: parameters, masks of layers, FLOPs, memory, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.checkpoint.planning.memory import memory_of
from engine.lora import Lora, adapters_unsupported_reason
from engine.method import method_unsupported_reason
from engine.models.architecture import shortest_pattern
from engine.models.decoder import Decoder
from engine.settings import Checkpoint, TrialSettings, from_json, to_json
from engine.shape import ModelShape
from harness.metrics.flops import work_of
from harness.spec.methods import method_named
from harness.spec.trial import id_of
from tests.harness.metrics import second_formulas as formulas

LLAMA = ModelShape(name="m", layers=5, hidden=24, ffn=20, heads=4, kv_heads=2, head_dim=6, vocab=257)
MAMBA: dict[str, Any] = {
    "linear": "mamba2", "linear_heads": 4, "linear_key_heads": 2, "linear_key_dim": 6, "linear_value_dim": 3,
    "layer_pattern": "fL",
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "tied": {"tied": True},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "not gated, biased": {"gated": False, "mlp_bias": True},
    "norms after": {"norms": "after", "qk_norm": True, "qk_norm_whole": True},
    "norms on both sides": {"norms": "both", "qk_norm": True},
    "latents": {"kv_heads": 4, "kv_latent": 7, "q_latent": 9, "rope_dim": 2, "value_dim": 8, "qkv_bias": True},
    "a latent of keys": {"kv_heads": 4, "kv_latent": 7, "rope_dim": 4, "value_dim": 5, "sinks": True},
}


def trial(shape: ModelShape, **settings: Any) -> TrialSettings:
    return TrialSettings(**{"task": "train", "method": "burst", "model": shape, "seq_len": 64} | settings)


@pytest.mark.parametrize("features", [*FEATURES.values(), MAMBA], ids=[*FEATURES, "layers without an MLP"])
def test_sizes_said_without_the_model_are_those_of_the_model_in_its_order(features: dict[str, Any]) -> None:
    shape = replace(LLAMA, **features)
    with torch.device("meta"):
        built = {name: tuple(parameter.shape) for name, parameter in Decoder(shape).named_parameters()}
    assert list(shape.parameter_sizes().items()) == list(built.items())
    assert shape.parameters == sum(torch.Size(size).numel() for size in built.values())


def test_a_pattern_of_windows_is_the_shortest_that_repeats() -> None:
    assert [shortest_pattern(text) for text in ("wwww", "wfwfw", "wwf", "wwwwwfww", "f")] == [
        "w", "wf", "wwf", "wwwwwf", "f",
    ]  # fmt: skip
    assert replace(LLAMA, window=8, layer_pattern="wwf").windowed == (True, True, False, True, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": -1}, "window is -1"),
        ({"window": 8, "layer_pattern": "wx"}, "layer_pattern is 'wx'; give a letter for each layer"),
        ({"rope_scaling": "linear"}, "factor is missing"),
        (
            {"rope_scaling": "default:partial_rotary_factor=0.5", "attention_scale": 0.5},
            "partial_rotary_factor is 0.5 and attention_scale 0.5; expected 1 or 0",
        ),
        ({"attention_scale": -1.0}, "attention_scale is -1"),
        ({"attention_scale": float("nan")}, "attention_scale is nan; give a finite number"),
        ({"rope_base": float("inf")}, "rope_base is inf; give a finite number above 0"),
        ({"value_dim": 4}, "value_dim is given without kv_latent"),
        ({"kv_latent": 7, "rope_dim": 2}, "2 KV heads of 4; with kv_latent give"),
        ({"kv_latent": 7, "kv_heads": 4, "rope_dim": 6}, "rope_dim is 6 of head_dim 6"),
        ({"kv_latent": 7, "kv_heads": 4}, "rope_dim is 0 with kv_latent"),
        ({"kv_latent": 7, "kv_heads": 4, "rope_dim": 3}, "rope_dim 3 is odd; RoPE needs an even rope_dim"),
        ({"linear_heads": 4, "linear_key_heads": 2}, "linear_heads is given without linear"),
        ({"linear_conv": 7}, "linear_conv is given without linear; give both, or neither"),
        (
            MAMBA | {"layer_pattern": "lllllf"},
            "5 of 5 layers are linear by the pattern's first 5 letters; give a kind of",
        ),
        ({"layer_pattern": "wF"}, "capitals, and 3 of 5 layers have an MLP and 0 are linear; give at least one of eac"),
        (MAMBA | {"layer_pattern": "LF"}, "capitals, and 0 of 5 layers have an MLP and 3 are linear; give at least"),
        (MAMBA | {"linear": "gated_delta_net", "linear_step_min": 0.1}, "linear_step_min is 0.1, and linear is gated_"),
        ({"rope": False, "rope_base": 1e6}, "rope_base is 1000000.0 with rope: false, where nothing is rotated; leave"),
        ({"rope": False, "attention_scale": 0.5}, "attention_scale is 0.5 with rope: false, where nothing is rotated"),
        (
            {"kv_latent": 7, "kv_heads": 4, "rope_dim": 2, "qk_norm": True},
            "norms and a scale of its own and no gate; leave it out",
        ),
    ],
)
def test_a_feature_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(LLAMA, **changes)


def test_a_trial_of_windows_alone_has_their_mask_and_one_of_both_kinds_that_of_the_others() -> None:
    alone, mixed = replace(LLAMA, window=8), replace(LLAMA, window=8, layer_pattern="wwf")
    assert trial(alone).mask == trial(mixed).mask == "causal"
    assert trial(alone).layer_masks == ("sliding_window:7",) * 5
    assert trial(alone).masks == trial(alone, mask="sliding_window:7").masks == ("sliding_window:7",)
    assert trial(mixed).layer_masks == (*["sliding_window:7"] * 2, "causal", *["sliding_window:7"] * 2)
    assert trial(mixed).masks == ("causal", "sliding_window:7")
    with pytest.raises(ValueError, match="mask is sliding_window:7, but model m has a window of 8 tokens in 4 of 5"):
        trial(mixed, mask="sliding_window:7")
    for shape in (alone, mixed):
        assert from_json(TrialSettings, to_json(trial(shape))) == trial(shape)
        with pytest.raises(ValueError, match=r"mask is full, but model m has a window of 8 tokens in . of 5 layers"):
            trial(shape, mask="full")
    assert trial(mixed, task="attention", mask="full").masks == ("full",)


@pytest.mark.parametrize("pattern", ["w", "wwf", "f"])
@pytest.mark.parametrize("checkpoint", [Checkpoint(every=0), Checkpoint(every=2, tail=0.5)], ids=str)
def test_attention_is_counted_layer_by_layer(pattern: str, checkpoint: Checkpoint) -> None:
    shape, seq_len = replace(LLAMA, window=8, layer_pattern=pattern), 64
    inside = sum(min(8, query + 1) for query in range(seq_len))
    pairs = sum(inside if windowed else seq_len * (seq_len + 1) // 2 for windowed in shape.windowed)
    settings = trial(shape, checkpoint=checkpoint)
    work = work_of(settings)
    assert work.attention == pytest.approx(4 * 4 * 6 * pairs)
    if checkpoint.every == 0:
        assert work.recomputed_attention == 0
    assert work.model == pytest.approx(3 * formulas._forward_flops(settings))
    assert work.recomputed_layers + work.recomputed_attention == pytest.approx(formulas._repeated_flops(settings))


@pytest.mark.parametrize("features", FEATURES.values(), ids=list(FEATURES))
@pytest.mark.parametrize("tiles", [1, 3])
def test_verify_counts_repeated_products_as_the_engine_does(features: dict[str, Any], tiles: int) -> None:
    shape = replace(LLAMA, **features)
    checkpoint = Checkpoint(every=2, whole_layers=2, mlp=0.5)
    settings = trial(shape, checkpoint=checkpoint, mlp_tiles=tiles, projection_tiles=tiles)
    assert work_of(settings).recomputed_layers == pytest.approx(
        formulas._repeated_flops(settings) - work_of(settings).recomputed_attention
    )


def test_a_tied_model_holds_its_table_once() -> None:
    wide = replace(LLAMA, vocab=100_000)
    table = wide.vocab * wide.hidden
    apart, tied = (memory_of(trial(shape, cuda_graph="none")).allocated for shape in (wide, replace(wide, tied=True)))
    assert apart - tied == pytest.approx(3 * 4 * table + 2 * table, rel=0.01)  # master, moments, and the copy in bf16


def test_a_feature_makes_another_trial() -> None:
    assert id_of(trial(LLAMA)) != id_of(trial(replace(LLAMA, tied=True)))


def test_methods_refuse_layers_and_features_that_they_lack() -> None:
    mixed = trial(replace(LLAMA, window=8, layer_pattern="wf"), cp_size=2)
    assert method_unsupported_reason(method_named("burst"), mixed) is None
    assert "sliding_window:7" in (
        method_unsupported_reason(method_named("torch_cp"), replace(mixed, method="torch_cp")) or ""
    )
    latent = replace(LLAMA, **FEATURES["latents"])
    for method, task, words in (
        ("torch_cp", "train", "has no latent attention"), ("burst", "attention", "has a latent of them; choose task"),
    ):  # fmt: skip
        settings = trial(latent, method=method, task=task, cp_size=2)
        assert words in (method_unsupported_reason(method_named(method), settings) or "")
    adapted = trial(latent, lora=Lora(rank=2, alpha=1.0, targets=("k", "output")))
    reason = method_unsupported_reason(method_named("burst"), adapted)
    assert reason == "lora.targets has k, but model m forms it from a latent; leave it out"
    biased = trial(replace(LLAMA, qkv_bias=True), method="trl_upstream")
    assert "trl_upstream trains Llama's decoder, and model m has qkv_bias True" in (
        method_unsupported_reason(method_named("trl_upstream"), biased) or ""
    )


def test_adapters_have_no_larger_rank_than_their_matrix() -> None:
    shape = ModelShape(name="m", layers=1, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=128)
    asked = {rank: adapters_unsupported_reason(shape, Lora(rank=rank, alpha=1, targets=("k",))) for rank in (64, 65)}
    assert asked[64] is None
    assert asked[65] == "lora.rank is 65, but k of model m is a matrix of 32 x 64; give at most 64"
