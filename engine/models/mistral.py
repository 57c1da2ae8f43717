"""Mistral (arXiv:2310.06825): Llama whose layers, in its first release, all have a window."""

from __future__ import annotations

from typing import Any

from engine.models.architecture import Architecture, Config
from engine.settings import ModelShape


def read(config: Config) -> dict[str, Any]:
    window = 0 if config.content.get("sliding_window") is None else config.whole("sliding_window")
    return config.windows(config.layers, window)


def write(shape: ModelShape) -> dict[str, Any]:
    return {"hidden_act": "silu", "sliding_window": shape.window or None}


ARCHITECTURE = Architecture(
    class_name="MistralForCausalLM",
    model_type="mistral",
    read=read,
    write=write,
    neutral={"hidden_act": ("silu",), "layer_types": (None,)},
)
