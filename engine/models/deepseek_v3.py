"""DeepSeek-V3 (arXiv:2412.19437): latent attention, RoPE on a part of each head, YaRN with a factor of the scores.

Models whose layers are all dense, without experts: `first_k_dense_replace` is the number of layers.
"""

from __future__ import annotations

from engine.models.architecture import Architecture, Config
from engine.shape import ModelShape

NAMES = {
    "attention.q_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.q_b": "self_attn.q_b_proj",
    "attention.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.kv_b": "self_attn.kv_b_proj",
}


def read(config: Config) -> dict[str, object]:
    return {"rope_interleaved": config.flag("rope_interleave", True), **read_latent(config)}


def read_latent(config: Config) -> dict[str, object]:
    """Fields of latent attention. Raises ValueError for layers with experts."""
    dense = config.content.get("first_k_dense_replace")
    if dense != config.layers:
        raise ValueError(
            f"first_k_dense_replace is {dense!r}; expected {config.layers}, the number of layers: layers after it have "
            "experts, which this model does not have"
        )
    bias, rope_dim = config.flag("attention_bias"), config.whole("qk_rope_head_dim")
    return {
        "kv_latent": config.whole("kv_lora_rank"),
        "q_latent": 0 if config.content.get("q_lora_rank") is None else config.whole("q_lora_rank"),
        "rope_dim": rope_dim,
        "head_dim": config.whole("qk_nope_head_dim") + rope_dim,
        "value_dim": config.whole("v_head_dim"),
        "qkv_bias": bias,
        "output_bias": bias,
    }


def write(shape: ModelShape) -> dict[str, object]:
    return {"rope_interleave": shape.rope_interleaved, **write_latent(shape)}


def write_latent(shape: ModelShape) -> dict[str, object]:
    return {
        "hidden_act": "silu",
        "attention_bias": shape.qkv_bias,
        "first_k_dense_replace": shape.layers,
        "kv_lora_rank": shape.kv_latent,
        "q_lora_rank": shape.q_latent or None,
        "qk_rope_head_dim": shape.rope_dim,
        "qk_nope_head_dim": shape.head_dim - shape.rope_dim,
        "v_head_dim": shape.output_dim,
        "head_dim": shape.rope_dim,  # what transformers means by it here
    }


ARCHITECTURE = Architecture(
    class_name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    read=read,
    write=write,
    neutral={"hidden_act": ("silu",)},
    names=NAMES,
)
