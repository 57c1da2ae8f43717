"""OLMo 2 (arXiv:2501.00656): RMS norms of what attention and MLP give, and of all queries and of all keys at once."""

from __future__ import annotations

from engine.models.architecture import Architecture, Config
from engine.shape import ModelShape


def read(config: Config) -> dict[str, object]:
    bias = config.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias, "norms": "after", "qk_norm": True, "qk_norm_whole": True}


def write(shape: ModelShape) -> dict[str, object]:
    return {"hidden_act": "silu", "attention_bias": shape.qkv_bias}


ARCHITECTURE = Architecture(
    class_name="Olmo2ForCausalLM",
    model_type="olmo2",
    read=read,
    write=write,
    neutral={"hidden_act": ("silu",), "sliding_window": (None,), "layer_types": (None,)},
    names={"attention.post_norm": "post_attention_layernorm", "mlp.post_norm": "post_feedforward_layernorm"},
)
