"""Gemma 3, its text models (arXiv:2503.19786): five layers with a window to one without, each kind with its own RoPE.

RMS norms stand before and after both halves of a layer, and of every head's queries and keys; files hold their weights
without the 1 that is added to them. The embedding is scaled by the square root of the hidden size and is the LM head.
"""

from __future__ import annotations

import math

from engine.models.architecture import Architecture, Config, layer_kinds
from engine.rope import read_rope
from engine.shape import ModelShape

BASE, WINDOW_BASE = 1_000_000.0, 10_000.0  # of configurations that name none
PATTERN = 6  # layers, of which the last one has no window; configurations before `layer_types` may give another number


def read(config: Config) -> dict[str, object]:
    bias, head_dim = config.flag("attention_bias"), config.whole("head_dim")
    scaled_by = config.number("query_pre_attn_scalar")
    if scaled_by <= 0:
        raise ValueError(f"query_pre_attn_scalar is {scaled_by:g}; expected a number above 0")
    base, scaling = read_rope(config.content, "full_attention", base=BASE)
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "norms": "both",
        "qk_norm": True,
        "activation": "gelu_tanh",
        "embedding_scale": math.sqrt(config.whole("hidden_size")),
        "attention_scale": 0.0 if scaled_by == head_dim else scaled_by**-0.5,
        "head_dim": head_dim,
        "rope_base": base,
        "rope_scaling": scaling,
        **_windows(config),
    }


def _windows(config: Config) -> dict[str, object]:
    """Fields of the layers with a window, none where no layer has one."""
    every, content = PATTERN, config.content
    if content.get("layer_types") is None and "sliding_window_pattern" in content:
        every = config.whole("sliding_window_pattern")
    windows = config.windows(layer_kinds((layer + 1) % every > 0 for layer in range(config.layers)))
    if not windows:
        return {}
    # Release 5 has a dictionary for each kind of layers; release 4 a base of its own, and windows are never scaled.
    kinds = content.get("rope_parameters")
    if kinds is None:
        kinds = {"rope_theta": content.get("rope_local_base_freq")}
    base, scaling = read_rope({"rope_parameters": kinds}, "sliding_attention", base=WINDOW_BASE)
    if scaling != "none":
        raise ValueError(
            f"rope_parameters of sliding_attention is {scaling}, which this model does not have; expected default"
        )
    return windows | {"rope_base_window": base}


def write(shape: ModelShape) -> dict[str, object]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": shape.qkv_bias,
        "query_pre_attn_scalar": round(shape.attention_scale**-2) if shape.attention_scale else shape.head_dim,
        "sliding_window": shape.window or None,
        "layer_types": layer_kinds(shape.windowed),
        "rope_local_base_freq": shape.rope_base_window or WINDOW_BASE,
    }


ARCHITECTURE = Architecture(
    class_name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    read=read,
    write=write,
    neutral={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (None, False),
    },
    names={
        "attention.post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp.post_norm": "post_feedforward_layernorm",
    },
    offsets=dict.fromkeys(
        (
            "attention_norm",
            "attention.q_norm",
            "attention.k_norm",
            "attention.post_norm",
            "mlp_norm",
            "mlp.post_norm",
            "norm",
        ),
        1.0,
    ),
    tied=True,
)
