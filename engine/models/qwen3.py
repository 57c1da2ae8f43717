"""Qwen3 (arXiv:2505.09388): Llama with an RMS norm of every head's queries and keys; small models are tied.

Windows of its layers follow `use_sliding_window`, as in Qwen2.5.
"""

from __future__ import annotations

from engine.models import qwen2
from engine.models.architecture import Architecture, Config
from engine.shape import ModelShape


def read(config: Config) -> dict[str, object]:
    bias = config.flag("attention_bias")
    return {
        "qk_norm": True,
        "head_dim": config.whole("head_dim"),
        "qkv_bias": bias,
        "output_bias": bias,
        **qwen2.read_windows(config),
    }


def write(shape: ModelShape) -> dict[str, object]:
    return {"hidden_act": "silu", "attention_bias": shape.qkv_bias, **qwen2.write_windows(shape)}


ARCHITECTURE = Architecture(
    class_name="Qwen3ForCausalLM",
    model_type="qwen3",
    read=read,
    write=write,
    neutral={"hidden_act": ("silu",)},
)
