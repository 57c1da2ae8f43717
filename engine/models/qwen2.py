"""Qwen2 and Qwen2.5 (arXiv:2412.15115): Llama with biases of queries, keys and values; small models are tied.

With `use_sliding_window` the layers from `max_window_layers` on have a window; published models switch it off.
"""

from __future__ import annotations

from engine.models.architecture import Architecture, Config, layer_kinds
from engine.shape import ModelShape


def read(config: Config) -> dict[str, object]:
    return {"qkv_bias": True, **read_windows(config)}


def write(shape: ModelShape) -> dict[str, object]:
    return {"hidden_act": "silu", **write_windows(shape)}


def read_windows(config: Config) -> dict[str, object]:
    """Fields of the windows of Qwen2.5 and Qwen3."""
    in_use = config.flag("use_sliding_window") and config.content.get("sliding_window") is not None
    first = config.layers
    if in_use and config.content.get("layer_types") is None:
        first = config.whole("max_window_layers", least=0)
    return config.windows(layer_kinds(layer >= first for layer in range(config.layers)), in_use=in_use)


def write_windows(shape: ModelShape) -> dict[str, object]:
    """Keys of the windows of Qwen2.5 and Qwen3."""
    if not any(shape.windowed):
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": shape.window,
        "max_window_layers": shape.windowed.index(True),
        "layer_types": layer_kinds(shape.windowed),
    }


ARCHITECTURE = Architecture(
    class_name="Qwen2ForCausalLM",
    model_type="qwen2",
    read=read,
    write=write,
    neutral={"hidden_act": ("silu",)},
)
