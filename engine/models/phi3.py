"""Phi-3 and Phi-4 (arXiv:2404.14219): Llama with fused matrices, longrope in long-context models, and windows.

A file holds q, k and v as one tensor, and so gate and up, each one above another.
"""

from __future__ import annotations

from engine.models.architecture import Architecture
from engine.models.mistral import read
from engine.shape import ModelShape


def write(shape: ModelShape) -> dict[str, object]:
    # Without a padding token: transformers' default is a word that a smaller vocabulary lacks, and it refuses that.
    return {"hidden_act": "silu", "sliding_window": shape.window or None, "pad_token_id": None}


ARCHITECTURE = Architecture(
    class_name="Phi3ForCausalLM",
    model_type="phi3",
    read=read,
    write=write,
    neutral={"hidden_act": ("silu",), "attention_bias": (None, False), "layer_types": (None,)},
    partial_rotary=True,
    names={
        "attention.q": "self_attn.qkv_proj",
        "attention.k": "self_attn.qkv_proj",
        "attention.v": "self_attn.qkv_proj",
        "mlp.gate": "mlp.gate_up_proj",
        "mlp.up": "mlp.gate_up_proj",
    },
)
