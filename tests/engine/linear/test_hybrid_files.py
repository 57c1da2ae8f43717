"""Configurations of models with linear layers that the decoder does not have are refused by key and value."""

from __future__ import annotations

from typing import Any

import pytest

from engine.models.architecture import config_of, shape_of
from engine.settings import from_json, to_json
from engine.shape import ModelShape

SIZES: dict[str, Any] = {
    "num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 257, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip
DELTA_NET = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
NEXT = SIZES | DELTA_NET | {"architectures": ["Qwen3NextForCausalLM"], "num_experts": 0}
DENSE = SIZES | DELTA_NET | {"architectures": ["Qwen3_5ForCausalLM"]}
BAMBA = SIZES | {
    "architectures": ["BambaForCausalLM"], "attn_layer_indices": [3, 7], "mamba_expand": 2, "mamba_n_heads": 16,
    "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
}  # fmt: skip


@pytest.mark.parametrize("config", [NEXT, DENSE, BAMBA])
def test_every_fourth_layer_has_attention_unless_a_configuration_says_otherwise(config: dict[str, Any]) -> None:
    shape = shape_of(config, "hybrid")
    assert shape.layer_pattern == "lllf"
    assert shape.rope_scaling.endswith("0.5" if config is BAMBA else "0.25")
    assert shape_of(config_of(shape, "float32", None), "hybrid") == shape


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (NEXT, {"num_experts": 512}, r"num_experts is 512 and mlp_only_layers \[\]; expected all 8 layers in it"),
        (NEXT, {"num_experts": 8, "mlp_only_layers": [[0]]}, r"mlp_only_layers \[\[0\]\]; expected all 8 layers in it"),
        (NEXT, {"layer_types": ["full_attention"] * 7}, "layer_types is .*; expected 8 of full_attention, linear_att"),
        (DENSE, {"layer_types": ["sliding_attention"] * 8}, "layer_types is .*; expected 8 of full_attention, linear"),
        (DENSE, {"layer_types": ["linear_attention"] * 8}, "linear is gated_delta_net and 8 of 8 layers are linear"),
        (DENSE, {"linear_num_value_heads": 3}, "3 linear heads are not divisible by 2 linear key heads"),
        (DENSE, {"hidden_act": "gelu"}, "hidden_act is 'gelu', which this model does not have; expected 'silu'"),
        (BAMBA, {"attn_layer_indices": [8]}, r"attn_layer_indices is \[8\]; expected numbers of layers below 8"),
        (BAMBA, {"mamba_d_head": 16}, "mamba_d_head is 16 and mamba_n_heads 16; expected together .* = 128"),
        (BAMBA, {"mamba_proj_bias": True}, "mamba_proj_bias is True, which this model does not have"),
        (BAMBA, {"time_step_limit": [0.1, 1.0]}, r"time_step_limit is \[0.1, 1.0\], which this model does not have"),
    ],
)
def test_what_the_decoder_does_not_have_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of(config | changes, "hybrid")


def test_files_of_before_layer_pattern_are_read() -> None:
    shape = shape_of(DENSE, "hybrid")
    older = {"window_pattern" if key == "layer_pattern" else key: value for key, value in to_json(shape).items()}
    assert from_json(ModelShape, older) == shape
