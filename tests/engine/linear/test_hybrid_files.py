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
NEMOTRON = SIZES | {
    "architectures": ["NemotronHForCausalLM"], "num_hidden_layers": 7, "hybrid_override_pattern": "M-M*-M-",
    "mlp_hidden_act": "relu2", "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2,
    "ssm_state_size": 16,
}  # fmt: skip


@pytest.mark.parametrize("config", [NEXT, DENSE, BAMBA])
def test_every_fourth_layer_has_attention_unless_a_configuration_says_otherwise(config: dict[str, Any]) -> None:
    shape = shape_of(config, "hybrid")
    assert shape.layer_pattern == "lllf"
    assert shape.rope_scaling.endswith("0.5" if config is BAMBA else "0.25")
    assert shape_of(config_of(shape, "float32", None), "hybrid") == shape


def test_halves_of_nemotron_h_are_layers_with_and_without_an_mlp() -> None:
    shape = shape_of(NEMOTRON, "hybrid")
    assert (shape.layers, shape.layer_pattern, shape.rope) == (4, "lLf", False)
    assert shape.mlps == (True, False, True, True)
    again = config_of(shape, "float32", None)
    assert again["hybrid_override_pattern"] == "M-M*-M-"
    assert shape_of(again, "hybrid") == shape
    kinds = ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "mlp"]  # as in files of before 5.23
    assert (
        shape_of(
            NEMOTRON | {"num_hidden_layers": 7, "layers_block_type": kinds, "hybrid_override_pattern": None}, "hybrid"
        )
        == shape
    )


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
        (
            NEMOTRON,
            {"hybrid_override_pattern": "MEM*-M-"},
            "layer 1 has experts, which this model does not have; expec",
        ),
        (NEMOTRON, {"hybrid_override_pattern": "M--*-M-"}, "layer 2 is an MLP, and the one before it is an MLP too; e"),
        (NEMOTRON, {"hybrid_override_pattern": "-MM*-M-"}, "layer 0 is an MLP, and the one before it is missing; exp"),
        (NEMOTRON, {"hybrid_override_pattern": "M-M*-MX"}, "layer 6 is 'X'; expected linear_attention, full_attention"),
        (NEMOTRON, {"hybrid_override_pattern": "MMM*MMM"}, "capitals, and 0 of 7 layers have an MLP and 6 are linear"),
        (NEMOTRON, {"hybrid_override_pattern": "M-"}, "num_hidden_layers is 7, which this model does not have; expect"),
        (NEMOTRON, {"hybrid_override_pattern": None}, "layers_block_type is 'None' and hybrid_override_pattern 'None'"),
        (NEMOTRON, {"layers_block_type": ["mlp"] * 7}, r"layers_block_type is .* or the same as a text of M, \* and -"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu', which this model does not have; expected 'r"),
        (NEMOTRON, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1, which this model does not have"),
        (NEMOTRON, {"auto_map": {"AutoModelForCausalLM": "other.Model"}}, "auto_map is .*, which this model does not"),
        (NEMOTRON, {"time_step_limit": [0.1, 1.0]}, r"time_step_limit is \[0.1, 1.0\], which this model does not have"),
        (NEMOTRON, {"use_bias": True}, "use_bias is True, which this model does not have; expected missing or False"),
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
