"""A Llama of transformers with this package's attention: `burst.register` and `burst.shard_batch`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import burst
from conform.context import context_of
from conform.summed import LabelCount, evaluation_of, step_of
from conform.target import CaseProblem, Part, version_of

NAME = "transformers with burst.register"
RANKS = (1, 2, 4, 8)
REQUIRES = ("transformers",)
INSTALL = "pip install transformers==5.23.0"
CAPABILITIES = (
    *("causal", "documents", "window", "grouped_heads", "few_kv_heads", "odd_lengths", "short", "batch", "bf16"),
    *("padding_right", "padding_left", "evaluation", "accumulation", "checkpointing", "offload", "autocast", "tied"),
    *("frozen", "two_models", "deterministic"),
)


def VERSION() -> str:
    return f"burst-harness {version_of()}, transformers {version_of('transformers')}"


def make_model(problem: CaseProblem) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    burst.register(context_of(problem.group))
    sizes = dict(
        vocab_size=problem.vocab, hidden_size=problem.hidden, intermediate_size=problem.ffn,
        num_hidden_layers=problem.layers, num_attention_heads=problem.heads, num_key_value_heads=problem.kv_heads,
        head_dim=problem.head_dim, rms_norm_eps=problem.norm_eps, tie_word_embeddings=problem.tied, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": problem.rope_theta}, attn_implementation="burst",
    )  # fmt: skip
    if problem.window is None:
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes))
    else:  # which counts the token itself
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=problem.window + 1))
    model.load_state_dict(dict(problem.state), strict=not problem.tied)
    model = model.to(problem.device, problem.torch_dtype).train()
    if problem.checkpointing:
        model.gradient_checkpointing_enable()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(problem.frozen) if problem.frozen else True)
    found: nn.Module = model
    return found


def shard(batch: Mapping[str, Tensor], problem: CaseProblem) -> Part:
    return burst.shard_batch(batch, context_of(problem.group))


def _loss(problem: CaseProblem, model: nn.Module, part: Part, labels: LabelCount) -> Tensor:
    offload = torch.autograd.graph.save_on_cpu() if problem.offload else contextlib.nullcontext()
    with torch.autocast(problem.device, torch.bfloat16, enabled=problem.autocast), offload:
        loss: Tensor = model(**{**part, "num_items_in_batch": labels}).loss
    return loss


def step(model: nn.Module, parts: Sequence[Part], problem: CaseProblem) -> Tensor:
    return step_of(partial(_loss, problem), model, parts, problem)


def gather(model: nn.Module, problem: CaseProblem) -> dict[str, Tensor]:
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def evaluate(model: nn.Module, part: Part, problem: CaseProblem) -> Tensor:
    return evaluation_of(partial(_loss, problem), model, part, problem)
