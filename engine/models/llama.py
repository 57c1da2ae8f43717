"""Llama 2, 3 and 3.1 to 3.3 (arXiv:2307.09288, arXiv:2407.21783): RMS norms before, SwiGLU, grouped queries, RoPE.

From 3.1 on RoPE is scaled (`llama3`); the small models of 3.2 have one matrix for embedding and LM head.
"""

from __future__ import annotations

from engine.models.architecture import FULL, Architecture, Config
from engine.shape import ModelShape


def read(config: Config) -> dict[str, object]:
    bias = config.flag("attention_bias")
    config.windows([FULL] * config.layers, in_use=False)  # raises where layer_types names one
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": config.flag("mlp_bias")}


def write(shape: ModelShape) -> dict[str, object]:
    if shape.hidden % shape.heads:
        raise ValueError(
            f"model {shape.name}: hidden {shape.hidden} is not divisible by {shape.heads} heads, which "
            "LlamaForCausalLM requires even with head_dim given; export a shape where it is"
        )
    return {"hidden_act": "silu", "attention_bias": shape.qkv_bias, "mlp_bias": shape.mlp_bias}


ARCHITECTURE = Architecture(
    class_name="LlamaForCausalLM",
    model_type="llama",
    read=read,
    write=write,
    neutral={"hidden_act": ("silu",), "sliding_window": (None,), "use_sliding_window": (None, False)},
)
