"""Qwen3-Next without experts: gated delta nets (arXiv:2412.06464), and every fourth layer gated attention.

RMS norms have weights stored without their 1, but for those of the delta nets' outputs; a quarter of each head is
rotated. Files interleave the rows of attention's queries and gate head by head, and those of a delta net by key heads.
Published models have experts, and are refused: this decoder has no router.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.models.architecture import FULL, LINEAR, Architecture, Config
from engine.rope import read_rope
from engine.shape import ModelShape

EVERY = 4  # layers, of which the last one has attention; a configuration may give another number
ROTATED = 0.25  # of each head's dimensions, where a configuration gives no part

NAMES = {
    "attention.gate": "self_attn.q_proj",
    "mixer.norm": "linear_attn.norm",
    "mixer.output": "linear_attn.out_proj",
    "mixer.conv": "linear_attn.conv1d",
    "mixer.decay_log": "linear_attn.A_log",
    "mixer.decay_bias": "linear_attn.dt_bias",
}
NORMS = ("attention_norm", "mixer_norm", "attention.q_norm", "attention.k_norm", "mlp_norm", "norm")


def read(config: Config) -> dict[str, object]:
    content = config.content
    dense = content.get("mlp_only_layers") or []
    in_all = isinstance(dense, list) and all(layer in dense for layer in range(config.layers))
    if config.whole("num_experts", least=0) and not in_all:
        raise ValueError(
            f"num_experts is {content['num_experts']} and mlp_only_layers {dense}; expected all {config.layers} layers "
            "in it, or no experts: this decoder has no router"
        )
    return read_dense(config)


def read_dense(config: Config) -> dict[str, object]:
    """Fields of Qwen3-Next and of Qwen3.5 without experts."""
    content, every = dict(config.content), EVERY
    if content.get("layer_types") is None and content.get("full_attention_interval") is not None:
        every = config.whole("full_attention_interval")
    bias = config.flag("attention_bias")
    rope = content.get("rope_parameters")
    if "partial_rotary_factor" not in (rope if isinstance(rope, dict) else content):
        content.setdefault("partial_rotary_factor", ROTATED)
    base, scaling = read_rope(content)
    return {
        "head_dim": config.whole("head_dim"),
        "qk_norm": True,
        "attention_gate": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "rope_base": base,
        "rope_scaling": scaling,
        **config.linear_layers([FULL if (layer + 1) % every == 0 else LINEAR for layer in range(config.layers)]),
        "linear": "gated_delta_net",
        "linear_heads": config.whole("linear_num_value_heads"),
        "linear_key_heads": config.whole("linear_num_key_heads"),
        "linear_key_dim": config.whole("linear_key_head_dim"),
        "linear_value_dim": config.whole("linear_value_head_dim"),
        "linear_conv": config.whole("linear_conv_kernel_dim"),
    }


def write(shape: ModelShape) -> dict[str, object]:
    return write_dense(shape) | {"num_experts": 0, "mlp_only_layers": list(range(shape.layers))}


def write_dense(shape: ModelShape) -> dict[str, object]:
    """The reverse of `read_dense`."""
    return {
        "hidden_act": "silu",
        "attention_bias": shape.qkv_bias,
        "layer_types": [LINEAR if linear else FULL for linear in shape.linear_layers],
        "linear_num_value_heads": shape.linear_heads,
        "linear_num_key_heads": shape.linear_key_heads,
        "linear_key_head_dim": shape.linear_key_dim,
        "linear_value_head_dim": shape.linear_value_dim,
        "linear_conv_kernel_dim": shape.linear_conv,
    }


def interleaved(shape: ModelShape) -> Mapping[str, int]:
    by_key_heads = dict.fromkeys(("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"), shape.linear_key_heads)
    return {"self_attn.q_proj": shape.heads} | by_key_heads


ARCHITECTURE = Architecture(
    class_name="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    read=read,
    write=write,
    neutral={"hidden_act": ("silu",)},
    names=NAMES
    | dict.fromkeys(("mixer.q", "mixer.k", "mixer.v", "mixer.gate"), "linear_attn.in_proj_qkvz")
    | dict.fromkeys(("mixer.beta", "mixer.decay"), "linear_attn.in_proj_ba"),
    interleaved=interleaved,
    offsets=dict.fromkeys(NORMS, 1.0),
    partial_rotary=True,
)
