"""torchtitan 0.3's Llama with its context parallelism: flexible attention whose keys are gathered.

Its model, masks, sharding of a batch and loss are called as its trainer calls them. FSDP and the optimizer are left
out, so gradients are summed over the ranks here. It is made for GPUs: on CPU ranks masks and attention run without a
compiler, and blocks of a mask, of which each rank has whole ones, are as small as cases are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from conform.flexible import allow_cpu
from conform.summed import evaluation_of, step_of
from conform.target import CaseProblem, Part
from conform.titan import cp_mesh, loss_of, mask_blocks, own_name, part_of, versions

NAME = "torchtitan"
RANKS = (1, 2, 4)
DEVICES = ("cpu",)
REQUIRES = ("torchtitan", "spmd_types", "tyro", "docstring_parser", "typeguard", "shtab", "triton")
INSTALL = (
    "pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro==0.9.35 docstring-parser==0.18.0 "
    "typeguard==4.4.4 shtab==1.13.0 triton==3.9.0"
)
CAPABILITIES = (
    "causal", "documents", "grouped_heads", "few_kv_heads", "batch", "bf16", "fp64", "evaluation", "accumulation",
    "checkpointing", "tied", "frozen", "two_models",
)  # fmt: skip
VERSION = versions
_own_name = partial(own_name, of_release={f"self_attn.{x}_proj": f"attention.qkv_linear.w{x}" for x in "qkv"})


def _config(problem: CaseProblem) -> Any:
    from torchtitan.models.common import Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.common.rope import CosSinRoPE
    from torchtitan.models.llama3 import Llama3Model, Llama3TransformerBlock

    drawn: Any = {"weight": nn.init.zeros_}
    norm = RMSNorm.Config(normalized_shape=problem.hidden, eps=problem.norm_eps, param_init=drawn)
    longest = max(problem.micro_batches or (problem.tokens,))
    layer = Llama3TransformerBlock.Config(
        attention_norm=norm,
        ffn_norm=dataclasses.replace(norm),
        attention=make_gqa_config(
            dim=problem.hidden, n_heads=problem.heads, n_kv_heads=problem.kv_heads, head_dim=problem.head_dim,
            wqkv_param_init=drawn, wo_param_init=drawn, inner_attention=FlexAttention.Config(),
            rope=CosSinRoPE.Config(dim=problem.head_dim, max_seq_len=longest, theta=problem.rope_theta),
        ),
        feed_forward=make_ffn_config(
            dim=problem.hidden, hidden_dim=problem.ffn, w1_param_init=drawn, w2w3_param_init=drawn
        ),
    )  # fmt: skip
    return Llama3Model.Config(
        dim=problem.hidden, vocab_size=problem.vocab, enable_weight_tying=problem.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=problem.vocab, embedding_dim=problem.hidden, param_init=drawn
        ),
        norm=dataclasses.replace(norm),
        lm_head=Linear.Config(in_features=problem.hidden, out_features=problem.vocab, param_init=drawn),
        layers=[layer] * problem.layers,
    )  # fmt: skip


def make_model(problem: CaseProblem) -> nn.Module:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torchtitan.distributed.context_parallel import apply_cp_to_forward
    from torchtitan.models.common import attention as titan

    allow_cpu()
    titan.FlexAttention._compiled_flex_attn = staticmethod(flex_attention)
    titan._compiled_create_block_mask = create_block_mask
    model: Any = _config(problem).build()
    model.init_states(buffer_device=torch.device("cpu"))
    state = {_own_name(name): weight for name, weight in problem.state.items()}
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown, unknown
    assert set(missing) <= {"lm_head.weight"} if problem.tied else not missing, missing
    if problem.tied:
        model.lm_head.weight = model.tok_embeddings.weight
        with torch.no_grad():
            model.tok_embeddings.weight.copy_(problem.state["model.embed_tokens.weight"])
    model = model.to(problem.torch_dtype).train()
    if problem.ranks > 1:
        apply_cp_to_forward([each.attention.inner_attention for each in model.layers.values()], cp_mesh(problem.ranks))
    if problem.checkpointing:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for name, layer in list(model.layers.items()):
            model.layers[name] = checkpoint_wrapper(layer)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(map(_own_name, problem.frozen)) or " "))
    built: nn.Module = model
    return built


def shard(batch: Mapping[str, Tensor], problem: CaseProblem) -> Part:
    positions = batch["position_ids"]
    with mask_blocks(batch, problem) as block_tokens:
        config = _config(problem)
        for layer in config.layers:
            layer.attention.inner_attention.block_size = block_tokens
        masks = config.build().get_attention_masks(positions)
        return part_of(batch, {"positions": positions, "attention_masks": masks}, problem)


def step(model: nn.Module, parts: Sequence[Part], problem: CaseProblem) -> Tensor:
    return step_of(loss_of, model, parts, problem)


def gather(model: nn.Module, problem: CaseProblem) -> dict[str, Tensor]:
    own = {name.replace("_checkpoint_wrapped_module.", ""): each.grad for name, each in model.named_parameters()}
    tied = {"tok_embeddings.weight": own["lm_head.weight"]} if "tok_embeddings.weight" not in own else {}
    found = {name: (own | tied)[_own_name(name)] for name in problem.state}
    return {name: each for name, each in found.items() if each is not None}


def evaluate(model: nn.Module, part: Part, problem: CaseProblem) -> Tensor:
    return evaluation_of(loss_of, model, part, problem)
