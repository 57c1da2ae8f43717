"""Names of the model's parameters in Hugging Face's Llama and Qwen3.

Tensors need no rearranging: both store a projection's weight as [out, in], and RoPE pairs the same halves.
"""

from __future__ import annotations

from engine.settings import ModelShape

EMBEDDING, HEAD = "embedding.weight", "head.weight"

_OUTSIDE = {EMBEDDING: "model.embed_tokens.weight", "norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
_IN_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a parameter of `Decoder`."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _blocks, layer, part = name.split(".", 2)
    return f"model.layers.{layer}.{_IN_LAYER[part]}"


def parameter_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Size of every parameter by its name in `engine.model.Decoder`, in the model's order; the model is not built."""
    hidden, ffn, head_dim = shape.hidden, shape.ffn, shape.head_dim
    queries, keys = shape.heads * head_dim, shape.kv_heads * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm.weight": (hidden,),
        "attention.q.weight": (queries, hidden),
        "attention.k.weight": (keys, hidden),
        "attention.v.weight": (keys, hidden),
        "attention.output.weight": (hidden, queries),
    }
    if shape.qk_norm:
        layer |= {"attention.q_norm.weight": (head_dim,), "attention.k_norm.weight": (head_dim,)}
    layer["mlp_norm.weight"] = (hidden,)
    if shape.gated:
        layer["mlp.gate.weight"] = (ffn, hidden)
    layer |= {"mlp.up.weight": (ffn, hidden), "mlp.down.weight": (hidden, ffn)}
    layers = {f"blocks.{index}.{name}": size for index in range(shape.layers) for name, size in layer.items()}
    return {EMBEDDING: (shape.vocab, hidden)} | layers | {"norm.weight": (hidden,), HEAD: (shape.vocab, hidden)}
