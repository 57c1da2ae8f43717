"""DeepSeek-V2 (arXiv:2405.04434): V3 with one order of the rotated dims. Models whose layers are all dense, without
experts."""

from __future__ import annotations

from engine.models.architecture import Architecture, Config
from engine.models.deepseek_v3 import NAMES, read_latent, write_latent
from engine.shape import ModelShape


def read(config: Config) -> dict[str, object]:
    return {"rope_interleaved": True, "mlp_bias": config.flag("mlp_bias"), **read_latent(config)}


def write(shape: ModelShape) -> dict[str, object]:
    return {"mlp_bias": shape.mlp_bias, **write_latent(shape)}


ARCHITECTURE = Architecture(
    class_name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    read=read,
    write=write,
    neutral={"hidden_act": ("silu",)},
    names=NAMES,
)
