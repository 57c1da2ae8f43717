"""Tiny models of every architecture in transformers, with random weights: what ours are compared with.

A new architecture is one more row of `CASES`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY = 257  # bytes, and one more: the trainer's tests read text as bytes
TOKENS = torch.randint(VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(VOCABULARY, TOKENS.shape, generator=torch.Generator().manual_seed(2))
WINDOW = 5  # tokens, fewer than a rank of four holds, so that windows cross ranks

# Heads whose width together is not `hidden_size` where an architecture allows it, and two queries to a KV head.
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-3,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "truncate": False}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
    "factor": 4.0,
}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # in torch's plain operations
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
TURNS = ["sliding_attention", "full_attention", "sliding_attention"]


def rope(base: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base} | scaling


# Name -> model_type, and what its configuration has beyond SIZES; None takes a key out.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {"num_key_value_heads": 4, "rope_parameters": rope(10_000.0)}),
    "llama 3": ("llama", {"rope_parameters": rope(500_000.0)}),
    "llama 3.1": (
        "llama",
        {"rope_parameters": rope(500.0, **LLAMA3_ROPE, original_max_position_embeddings=16)},
    ),
    "llama 3.2, tied": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": rope(500.0, **LLAMA3_ROPE, original_max_position_embeddings=16),
        },
    ),
    "linear RoPE": ("llama", {"rope_parameters": rope(100.0, rope_type="linear", factor=2.0)}),
    "dynamic RoPE": (
        "llama",
        {"max_position_embeddings": 10, "rope_parameters": rope(100.0, rope_type="dynamic", factor=3.0)},
    ),
    "longrope": ("llama", {"rope_parameters": rope(100.0, **LONGROPE, original_max_position_embeddings=10)}),
    "qwen2": ("qwen2", {"head_dim": None, "rope_parameters": rope(1_000_000.0)}),
    "qwen2, tied": ("qwen2", {"head_dim": None, "tie_word_embeddings": True, "rope_parameters": rope(1_000.0)}),
    "qwen3": ("qwen3", {"rope_parameters": rope(1_000_000.0)}),
    "mistral": ("mistral", {"sliding_window": WINDOW, "rope_parameters": rope(10_000.0)}),
    "phi3": (
        "phi3",
        {
            "head_dim": None,
            "sliding_window": WINDOW,
            "original_max_position_embeddings": 16,
            "rope_parameters": rope(
                100.0, rope_type="longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 2.5, 3.0, 3.5]
            ),
        },
    ),
    "phi3, half of each head rotated": (
        "phi3",
        {"head_dim": None, "sliding_window": None, "rope_parameters": rope(100.0, partial_rotary_factor=0.5)},
    ),
    "olmo2": ("olmo2", {"head_dim": None, "rope_parameters": rope(500_000.0)}),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "layer_types": TURNS,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": rope(1_000.0, rope_type="linear", factor=8.0),
                "sliding_attention": rope(100.0),
            },
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "sliding_window": WINDOW,
            "layer_types": TURNS,
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
            "swiglu_limit": 0.7,  # low enough for the clamps to matter
            "rope_parameters": rope(150.0, **YARN, original_max_position_embeddings=16),
        },
    ),
    "qwen3-next": (
        "qwen3_next",
        {
            "layer_types": HYBRID,
            "mlp_only_layers": [0, 1, 2],
            "attention_bias": True,
            "rope_parameters": rope(100.0, partial_rotary_factor=0.5),
            **DELTA_NET,
        },
    ),
    "qwen3.5": (
        "qwen3_5_text",
        {
            "layer_types": HYBRID,
            "tie_word_embeddings": True,
            "rope_parameters": rope(100.0, partial_rotary_factor=0.5, mrope_section=[1, 1, 1], mrope_interleaved=True),
            **DELTA_NET,
        },
    ),
    "bamba": (
        "bamba",
        {
            "head_dim": None,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 6,
            "mamba_chunk_size": 16,
            "rope_parameters": rope(100.0),
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "num_hidden_layers": None,
            "hybrid_override_pattern": "M-MM-*-*M",
            "layer_norm_epsilon": 1e-3,
            "mlp_bias": True,
            "mamba_num_heads": 8,
            "mamba_head_dim": 6,
            "n_groups": 2,
            "ssm_state_size": 6,
            "chunk_size": 16,
            "time_step_min": 0.09,  # large enough for some time steps to be below it
        },
    ),
}


LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": None, "first_k_dense_replace": 3, "kv_lora_rank": 10, "q_lora_rank": 14,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 6, "v_head_dim": 10,
}  # fmt: skip
CASES |= {
    "deepseek v3": (
        "deepseek_v3",
        LATENT
        | {"rope_parameters": rope(150.0, **YARN, mscale=0.7, mscale_all_dim=1.2, original_max_position_embeddings=16)},
    ),
    "deepseek v3, biases, halves, no latent of q": (
        "deepseek_v3",
        LATENT
        | {"attention_bias": True, "rope_interleave": False, "q_lora_rank": None, "rope_parameters": rope(150.0)},
    ),
    "deepseek v2": ("deepseek_v2", LATENT | {"attention_bias": True, "rope_parameters": rope(150.0)}),
}


def configuration(name: str) -> dict[str, Any]:
    """The content of a case's config.json, as transformers makes it of the keys given here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, own = CASES[name]
    keys = {key: value for key, value in (SIZES | own).items() if key not in own or value is not None}
    config = AutoConfig.for_model(model_type, **keys)
    return config.to_dict() | {"architectures": [AutoModelForCausalLM._model_mapping[type(config)].__name__]}


def model_of(config: dict[str, Any]) -> Any:
    """Transformers' model of a configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), **EAGER).eval()


def oracle(name: str) -> Any:
    """Transformers' model of a case, with weights of its own everywhere: all ones would hide a norm left out."""
    model = model_of(configuration(name)).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.2 * noise)
    return model


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files."""
    from safetensors.torch import load_file

    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
