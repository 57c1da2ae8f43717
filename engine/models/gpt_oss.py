"""gpt-oss (arXiv:2508.10925) with one expert: sinks and biases in attention, every other layer with a window, YaRN.

The MLP is that of one expert, a SwiGLU with bounds, which a router of one expert always takes with weight 1. Models
with more experts are refused: this decoder has no router. Files hold an expert's matrices as [experts, in, out], the
columns of gate and up in turn.
"""

from __future__ import annotations

from engine.models.architecture import Architecture, Config, layer_kinds
from engine.rope import read_rope
from engine.shape import ModelShape

BASE = 150_000.0  # of configurations that name none
# A configuration without any RoPE means this one.
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def read(config: Config) -> dict[str, object]:
    bias, content = config.flag("attention_bias", True), dict(config.content)
    if content.get("rope_parameters") is None and content.get("rope_scaling") is None:
        content["rope_scaling"] = YARN
    config.whole("num_local_experts")  # a configuration that lacks it means 128
    base, scaling = read_rope(content, base=BASE)
    return {
        "head_dim": config.whole("head_dim"),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": True,
        "sinks": True,
        "activation": "clamped_silu",
        "activation_alpha": config.number("swiglu_alpha") if "swiglu_alpha" in content else 1.702,
        "activation_limit": config.number("swiglu_limit") if "swiglu_limit" in content else 7.0,
        "rope_base": base,
        "rope_scaling": scaling,
        **config.windows(layer_kinds(layer % 2 == 0 for layer in range(config.layers))),
    }


def write(shape: ModelShape) -> dict[str, object]:
    return {
        "hidden_act": "silu",
        "attention_bias": shape.qkv_bias,
        "sliding_window": shape.window or None,
        "layer_types": layer_kinds(shape.windowed),
        "swiglu_alpha": shape.activation_alpha,
        "swiglu_limit": shape.activation_limit,
        "num_local_experts": 1,
        "num_experts_per_tok": 1,
    }


ARCHITECTURE = Architecture(
    class_name="GptOssForCausalLM",
    model_type="gpt_oss",
    read=read,
    write=write,
    neutral={"hidden_act": ("silu",), "num_local_experts": (1,), "num_experts_per_tok": (1,)},
    experts={
        "mlp.gate.weight": "mlp.experts.gate_up_proj",
        "mlp.up.weight": "mlp.experts.gate_up_proj",
        "mlp.down.weight": "mlp.experts.down_proj",
        "mlp.gate.bias": "mlp.experts.gate_up_proj_bias",
        "mlp.up.bias": "mlp.experts.gate_up_proj_bias",
        "mlp.down.bias": "mlp.experts.down_proj_bias",
    },
    unused=lambda shape: {"mlp.router.weight": (1, shape.hidden), "mlp.router.bias": (1,)},
)
