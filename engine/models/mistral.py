"""Mistral (arXiv:2310.06825): Llama whose layers, in its first release, all have a window."""

from __future__ import annotations

from engine.models.architecture import Architecture, Config, layer_kinds
from engine.shape import ModelShape


def read(config: Config) -> dict[str, object]:
    in_use = config.content.get("sliding_window") is not None
    return config.windows(layer_kinds([in_use] * config.layers), in_use=in_use)


def write(shape: ModelShape) -> dict[str, object]:
    return {"hidden_act": "silu", "sliding_window": shape.window or None}


ARCHITECTURE = Architecture(
    class_name="MistralForCausalLM",
    model_type="mistral",
    read=read,
    write=write,
    neutral={"hidden_act": ("silu",), "layer_types": (None,)},
)
