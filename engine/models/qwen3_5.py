"""Qwen3.5, its dense text models: Qwen3-Next with matrices of their own in place of interleaved ones.

Positions of text are the same in all three parts of its RoPE, so that it is plain RoPE of a quarter of each head.
"""

from __future__ import annotations

from engine.models.architecture import Architecture, Config
from engine.models.qwen3_next import NAMES, NORMS, read_dense, write_dense
from engine.shape import ModelShape

OF_IMAGES = ("mrope_section", "mrope_interleaved")  # keys of RoPE that text does not need


def read(config: Config) -> dict[str, object]:
    content = dict(config.content)
    if isinstance(rope := content.get("rope_parameters"), dict):
        content["rope_parameters"] = {key: value for key, value in rope.items() if key not in OF_IMAGES}
    return read_dense(Config(content))


def write(shape: ModelShape) -> dict[str, object]:
    return write_dense(shape)


ARCHITECTURE = Architecture(
    class_name="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    read=read,
    write=write,
    neutral={"hidden_act": ("silu",)},
    names=NAMES
    | dict.fromkeys(("mixer.q", "mixer.k", "mixer.v"), "linear_attn.in_proj_qkv")
    | {
        "mixer.gate": "linear_attn.in_proj_z",
        "mixer.beta": "linear_attn.in_proj_b",
        "mixer.decay": "linear_attn.in_proj_a",
    },
    interleaved=lambda shape: {"self_attn.q_proj": shape.heads},
    offsets=dict.fromkeys(NORMS, 1.0),
    partial_rotary=True,
)
