"""A model's shape as Hugging Face's `config.json`, and back.

Two architectures have exactly this model's mathematics: `LlamaForCausalLM`, and with the norm of queries and keys
`Qwen3ForCausalLM`. Any other feature of a configuration is an error and never ignored.

Source: transformers' documentation of LlamaConfig and Qwen3Config; defaults are those of its release 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.settings import ModelShape

LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
MODEL_TYPES = {LLAMA: "llama", QWEN3: "qwen3"}

DEFAULT_ROPE_BASE = 10000.0  # configurations older than `rope_theta` lack it

# Keys that may change the function computed, and the only values with which they do not.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "use_sliding_window": (None, False),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1),
    "auto_map": (None,),  # code that comes with the weights
}
PLAIN_ROPE = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}


def config_of(shape: ModelShape, dtype: str, max_positions: int | None) -> dict[str, Any]:
    """The configuration that makes transformers build this shape. Keys are those that releases 4 and 5 both read.

    Args:
        shape: a gated shape.
        dtype: of the exported tensors, by torch's name.
        max_positions: longest sequence, in tokens, the model was trained for; None leaves it out.

    Raises ValueError for a shape that neither architecture can express.
    """
    if not shape.gated:
        raise ValueError(
            f"model {shape.name} has a plain GELU MLP, which {LLAMA} and {QWEN3} do not have; "
            "export a shape whose MLP is gated"
        )
    architecture = QWEN3 if shape.qk_norm else LLAMA
    if architecture == LLAMA and shape.hidden % shape.heads:
        raise ValueError(
            f"model {shape.name}: hidden {shape.hidden} is not divisible by {shape.heads} heads, which {LLAMA} "
            "requires even with head_dim given; export a shape where it is"
        )
    return {
        "architectures": [architecture],
        "model_type": MODEL_TYPES[architecture],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_base,
        "rope_scaling": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    } | ({} if max_positions is None else {"max_position_embeddings": max_positions})


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape a configuration describes, under the given name. Raises ValueError for an unknown feature."""
    architecture = _architecture(config)
    for key, accepted in NEUTRAL.items():
        if key in config and config[key] not in accepted:
            raise _unsupported(key, config[key], accepted)
    # A window is in use unless Qwen3's separate switch is off.
    if config.get("sliding_window") is not None and config.get("use_sliding_window") is not False:
        raise _unsupported("sliding_window", config["sliding_window"], (None,))
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise ValueError("layer_types names other layers than full_attention, which this model does not have")
    heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    return ModelShape(
        name=name,
        layers=_whole(config, "num_hidden_layers"),
        hidden=hidden,
        ffn=_whole(config, "intermediate_size"),
        heads=heads,
        kv_heads=heads if config.get("num_key_value_heads") is None else _whole(config, "num_key_value_heads"),
        head_dim=_head_dim(config, architecture, hidden, heads),
        vocab=_whole(config, "vocab_size"),
        qk_norm=architecture == QWEN3,
        rope_base=_rope_base(config),
        norm_eps=_number("rms_norm_eps", config.get("rms_norm_eps")),
    )


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the LM head is the embedding. Raises ValueError for a value that is no truth value."""
    tied = config.get("tie_word_embeddings")
    if not isinstance(tied, bool | None):
        raise _unsupported("tie_word_embeddings", tied, (False, True))
    return bool(tied)


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in (LLAMA, QWEN3):
        raise ValueError(f"architectures is {named!r}; expected [{LLAMA!r}] or [{QWEN3!r}], which this model computes")
    return str(named[0])


def _head_dim(config: Mapping[str, Any], architecture: str, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None or architecture == QWEN3:
        return _whole(config, "head_dim")
    if heads < 1 or hidden % heads:
        raise ValueError(f"hidden_size {hidden} does not split into {heads} heads; add head_dim to the configuration")
    return hidden // heads


def _rope_base(config: Mapping[str, Any]) -> float:
    """The base of plain RoPE. Release 4 has it as `rope_theta`, release 5 inside `rope_parameters`."""
    bases = [config["rope_theta"]] if config.get("rope_theta") is not None else []
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        if not isinstance(rope, dict) or not _is_plain(rope):
            raise ValueError(
                f"{key} is {rope!r}; this model has plain RoPE over whole heads only: choose one without it"
            )
        if rope.get("rope_theta") is not None:
            bases.append(rope["rope_theta"])
    numbers = {_number("rope_theta", base) for base in bases} or {DEFAULT_ROPE_BASE}
    if len(numbers) > 1:
        raise ValueError(f"rope_theta is given as {sorted(numbers)}; keep the one the model was trained with")
    return numbers.pop()


def _is_plain(rope: Mapping[str, Any]) -> bool:
    """Whether positions are rotated unscaled, over the whole head and equally in all layers."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return rope.keys() <= PLAIN_ROPE and kind == "default" and rope.get("partial_rotary_factor") in (None, 1)


def _whole(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{key} is {_shown(value)}; expected a whole number")
    return value


def _number(key: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{key} is {_shown(value)}; expected a number")
    return number


def _unsupported(key: str, value: Any, accepted: tuple[Any, ...]) -> ValueError:
    expected = " or ".join(str(_shown(one)) for one in accepted)
    return ValueError(f"{key} is {value!r}, which this model does not have; expected {expected}")


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)
