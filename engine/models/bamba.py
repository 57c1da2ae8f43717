"""Bamba: Mamba-2 (arXiv:2405.21060) in most layers, attention of half-rotated heads in the others.

A file holds a mixer's gate, input, keys, queries and time step as one tensor, each one above another.
"""

from __future__ import annotations

from engine.models.architecture import FULL, LINEAR, NO_STEP_LIMIT, Architecture, Config, head_dim_of
from engine.rope import read_rope
from engine.shape import ModelShape

ROTATED = 0.5  # of each head's dimensions, whatever the configuration says


def read(config: Config) -> dict[str, object]:
    content, hidden = config.content, config.whole("hidden_size")
    bias, indices = config.flag("attention_bias"), content.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not all(index in range(config.layers) for index in indices):
        raise ValueError(f"attn_layer_indices is {indices!r}; expected numbers of layers below {config.layers}")
    heads, inner = config.whole("mamba_n_heads"), config.whole("mamba_expand") * hidden
    own = content.get("mamba_d_head", "auto")
    if inner % heads or own not in ("auto", inner // heads):
        raise ValueError(
            f"mamba_d_head is {own!r} and mamba_n_heads {heads}; expected together mamba_expand x hidden_size = {inner}"
        )
    base, scaling = read_rope({**content, "partial_rotary_factor": ROTATED})
    kinds = [FULL if layer in indices else LINEAR for layer in range(config.layers)]
    return {
        "head_dim": head_dim_of(config, hidden, config.whole("num_attention_heads")),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": config.flag("mlp_bias"),
        "rope_base": base,
        "rope_scaling": scaling,
        **Config({}).linear_layers(kinds),
        "linear": "mamba2",
        "linear_heads": heads,
        "linear_key_heads": config.whole("mamba_n_groups"),
        "linear_key_dim": config.whole("mamba_d_state"),
        "linear_value_dim": inner // heads,
        "linear_conv": config.whole("mamba_d_conv"),
    }


def write(shape: ModelShape) -> dict[str, object]:
    inner = shape.linear_heads * shape.linear_value_dim
    if inner % shape.hidden:
        raise ValueError(
            f"model {shape.name}: linear heads x value dim is {inner}, no multiple of hidden {shape.hidden}, which "
            "BambaForCausalLM requires; export a shape where it is"
        )
    return {
        "hidden_act": "silu",
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "attn_layer_indices": [layer for layer, linear in enumerate(shape.linear_layers) if not linear],
        "mamba_expand": inner // shape.hidden,
        "mamba_n_heads": shape.linear_heads,
        "mamba_d_head": shape.linear_value_dim,
        "mamba_n_groups": shape.linear_key_heads,
        "mamba_d_state": shape.linear_key_dim,
        "mamba_d_conv": shape.linear_conv,
        "pad_token_id": None,
    }


ARCHITECTURE = Architecture(
    class_name="BambaForCausalLM",
    model_type="bamba",
    read=read,
    write=write,
    neutral={
        "hidden_act": ("silu",),
        "mamba_conv_bias": (None, True),
        "mamba_proj_bias": (None, False),
        "z_loss_coefficient": (None, 0.0),
        "time_step_limit": NO_STEP_LIMIT,
    },
    names={
        "norm": "model.final_layernorm",
        "mlp_norm": "pre_ff_layernorm",
        "mlp.gate": "feed_forward.gate_proj",
        "mlp.up": "feed_forward.up_proj",
        "mlp.down": "feed_forward.down_proj",
        "mixer.norm": "mamba.norm",
        "mixer.output": "mamba.out_proj",
        "mixer.conv": "mamba.conv1d",
        "mixer.decay_log": "mamba.A_log",
        "mixer.decay_bias": "mamba.dt_bias",
        "mixer.skip": "mamba.D",
    }
    | dict.fromkeys(("mixer.gate", "mixer.v", "mixer.k", "mixer.q", "mixer.decay"), "mamba.in_proj"),
    partial_rotary=True,
)
