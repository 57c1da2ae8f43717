"""Published configurations are the shipped shapes, with as many parameters as transformers builds of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.models.architecture import config_of, shape_of
from harness.spec.models import MODELS_DIR, load_model
from tests.engine.models.architectures import model_of

# The parts of the published configurations that decide the mathematics, in the words of release 4.
LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
LLAMA_3_2_1B = LLAMA_3_8B | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "rope_scaling": {"factor": 32.0,
    "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3"}, "tie_word_embeddings": True, "head_dim": 64, "max_position_embeddings": 131072,
}  # fmt: skip
QWEN3_8B = LLAMA_3_8B | {
    "architectures": ["Qwen3ForCausalLM"], "intermediate_size": 12288, "model_type": "qwen3",
    "num_hidden_layers": 36, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "vocab_size": 151936, "head_dim": 128,
    "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
QWEN2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
    "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
GEMMA_3_4B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560,
    "intermediate_size": 10240, "model_type": "gemma3_text", "num_attention_heads": 8, "num_hidden_layers": 34,
    "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1000000.0, "sliding_window": 1024,
    "sliding_window_pattern": 6, "vocab_size": 262208,
}  # fmt: skip
OLMO_2_7B = LLAMA_3_8B | {
    "architectures": ["Olmo2ForCausalLM"], "intermediate_size": 11008, "model_type": "olmo2",
    "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "vocab_size": 100352,
}  # fmt: skip
NEMOTRON_H_8B = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_head_dim": 128, "auto_map": {
    "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
    "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}, "chunk_size": 128, "conv_kernel": 4,
    "expand": 2, "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 128,
    "mamba_proj_bias": False, "mlp_bias": False, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8,
    "num_attention_heads": 32, "num_hidden_layers": 52, "num_key_value_heads": 8, "residual_in_fp32": False,
    "rms_norm_eps": 1e-05, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False,
    "time_step_floor": 0.0001, "time_step_limit": [0.0, math.inf], "time_step_max": 0.1, "time_step_min": 0.001,
    "use_bias": False, "use_conv_bias": True, "vocab_size": 131072,
}  # fmt: skip
# Of 20B, at the sizes of tiny_gpt_oss and with one expert.
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "head_dim": 16, "hidden_act": "silu",
    "hidden_size": 96, "intermediate_size": 96, "layer_types": ["sliding_attention", "full_attention"],
    "model_type": "gpt_oss", "num_attention_heads": 8, "num_experts_per_tok": 1, "num_hidden_layers": 2,
    "num_key_value_heads": 4, "num_local_experts": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0,
    "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
    "truncate": False}, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "vocab_size": 256,
}  # fmt: skip
# Of DeepSeek-V3, at the sizes of tiny_deepseek_v3 and with dense layers alone.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 2,
    "hidden_act": "silu", "hidden_size": 96, "intermediate_size": 256, "kv_lora_rank": 32, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_attention_heads": 8, "num_hidden_layers": 2,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "q_lora_rank": 48, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40,
    "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "tie_word_embeddings": False, "v_head_dim": 16, "vocab_size": 256,
}  # fmt: skip
PUBLISHED = {
    "llama3_8b": LLAMA_3_8B,
    "llama3_2_1b": LLAMA_3_2_1B,
    "qwen3_8b": QWEN3_8B,
    "qwen2_5_7b": QWEN2_5_7B,
    "gemma3_4b": GEMMA_3_4B,
    "olmo2_7b": OLMO_2_7B,
    "nemotron_h_8b": NEMOTRON_H_8B,
    "tiny_gpt_oss": GPT_OSS,
    "tiny_deepseek_v3": DEEPSEEK_V3,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_the_shipped_shapes(name: str) -> None:
    assert shape_of(PUBLISHED[name], name) == load_model(MODELS_DIR / f"{name}.yaml")


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_as_many_parameters_as_transformers_builds(name: str) -> None:
    pytest.importorskip("transformers", reason="the oracle, transformers, is not installed: extra `test` has it")
    shape = load_model(MODELS_DIR / f"{name}.yaml")
    with torch.device("meta"):
        built = model_of(config_of(shape, "float32", None))
    # A router of one expert has no effect: what it adds are no parameters of ours.
    found = {key: each.numel() for key, each in built.named_parameters() if ".router." not in key}
    assert sum(found.values()) == shape.parameters


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "tiny_gpt_oss",
            {"num_local_experts": 32},
            "num_local_experts is 32, which this model does not have; expected 1",
        ),
        ("tiny_gpt_oss", {"num_experts_per_tok": 4}, "num_experts_per_tok is 4, .*; expected 1"),
        ("tiny_gpt_oss", {"num_local_experts": None}, "num_local_experts is None, .*; expected 1"),
        ("tiny_deepseek_v3", {"first_k_dense_replace": 1}, "first_k_dense_replace is 1; expected 2, .* have experts"),
        ("tiny_deepseek_v3", {"first_k_dense_replace": None}, "first_k_dense_replace is None; expected 2"),
        ("tiny_deepseek_v3", {"num_key_value_heads": 4}, "with 4 KV heads of 8; with kv_latent give"),
        ("tiny_deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank is missing; expected a whole number"),
        ("gemma3_4b", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, .*; expected missing"),
        ("gemma3_4b", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, .*; expected missing"),
        (
            "gemma3_4b",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is True, .*; expected missing",
        ),
        ("gemma3_4b", {"hidden_activation": "silu"}, "hidden_activation is 'silu', .*; expected 'gelu_pytorch_tanh'"),
        (
            "gemma3_4b",
            {
                "rope_theta": None,
                "rope_scaling": None,
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0},
                },
            },
            "sliding_attention is linear:factor=2, which this model does not have; expected default",
        ),
        ("gemma3_4b", {"sliding_window": None}, "sliding_window is missing; expected a whole number"),
        ("gemma3_4b", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; expected a number above 0"),
        ("gemma3_4b", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern is 0; expected a w"),
        ("gemma3_4b", {"layer_types": None, "sliding_window_pattern": -1}, "sliding_window_pattern is -1; expected"),
        ("llama3_2_1b", {"architectures": [{}]}, r"architectures is \[{}\]; expected a list of one of"),
        ("llama3_2_1b", {"layer_types": [{}, 1]}, r"layer_types is \[{}, 1\]; expected 16 of full_attention"),
        ("llama3_2_1b", {"num_hidden_layers": 10**12}, "num_hidden_layers is 10+; expected a whole number from 1 to"),
        ("olmo2_7b", {"hidden_act": "gelu"}, "hidden_act is 'gelu', .*; expected 'silu'"),
        ("llama3_2_1b", {"rope_scaling": {"rope_type": "su"}}, "rope_type is 'su', .*; expected default, linear"),
    ],
)
def test_what_an_architecture_does_not_have_is_refused_by_key_and_value(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of(PUBLISHED[name] | changes, name)
