"""torchtitan 0.2's Llama with its context parallelism: flexible attention whose keys are gathered.

As in torchtitan.py, which is of 0.3: its model, mask, sharding of a batch and loss are called as its trainer calls
them, without FSDP and optimizer. It divides documents at a token that ends them, which cases do not have, so documents
are not claimed. Its rotary embedding turns neighbouring channels, those of transformers the halves of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from conform.flexible import allow_cpu
from conform.summed import evaluation_of, step_of
from conform.target import CaseProblem, Part
from conform.titan import cp_mesh, loss_of, mask_blocks, own_name, part_of, versions

NAME = "torchtitan 0.2"
RANKS = (1, 2, 4)
DEVICES = ("cpu",)
REQUIRES = ("torchtitan", "torchdata", "tyro", "docstring_parser", "typeguard", "shtab", "triton")
INSTALL = (
    "pip install --no-deps torchtitan==0.2.2 torchdata==0.11.0 tyro==1.0.17 docstring-parser==0.18.0 "
    "typeguard==4.4.4 shtab==1.13.0 triton==3.9.0"
)
CAPABILITIES = (
    "causal", "grouped_heads", "few_kv_heads", "batch", "bf16", "evaluation", "accumulation", "frozen",
    "two_models",
)  # fmt: skip
VERSION = versions
_own_name = partial(
    own_name, of_release={"lm_head": "output"} | {f"self_attn.{x}_proj": f"attention.w{x}" for x in "qkv"}
)


def _reordered(name: str, weight: Tensor, problem: CaseProblem, pairs: tuple[int, int]) -> Tensor:
    """A weight of queries or keys, or its gradient, with the channels of each head in the other order. `pairs`:
    (2, -1) where the halves of a head turn together in `weight`, (-1, 2) where neighbours do. Others as they are."""
    if "q_proj" not in name and "k_proj" not in name:
        return weight
    by_pair = weight.unflatten(0, (-1, problem.head_dim)).unflatten(1, pairs)
    return by_pair.transpose(1, 2).reshape(weight.shape)


def make_model(problem: CaseProblem) -> nn.Module:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
    from torchtitan.models import attention as titan
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    allow_cpu()
    titan.FlexAttentionWrapper._compiled_flex_attn = staticmethod(flex_attention)
    titan._compiled_create_block_mask = create_block_mask
    width = int(2 * 4 * problem.hidden / 3)  # of its MLP, before the factor
    model: Any = Transformer(TransformerModelArgs(
        dim=problem.hidden, n_layers=problem.layers, n_heads=problem.heads, n_kv_heads=problem.kv_heads,
        vocab_size=problem.vocab, multiple_of=1, ffn_dim_multiplier=(problem.ffn + 0.5) / width,
        norm_eps=problem.norm_eps, rope_theta=problem.rope_theta, rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
        max_seq_len=max(problem.micro_batches or (problem.tokens,)), attn_type="flex",
    ))  # fmt: skip
    own = dict(model.named_parameters())
    for name, weight in problem.state.items():  # in the problem's dtype; its rotary embedding stays complex
        parameter = own[_own_name(name)]
        assert parameter.shape == weight.shape, name
        parameter.data = _reordered(name, weight, problem, (2, -1)).clone()
        parameter.requires_grad_(not name.startswith(problem.frozen or " "))
    if problem.ranks > 1:
        inner = [layer.attention.inner_attention for layer in model.layers.values()]
        apply_cp_to_attention_module(inner, cp_mesh(problem.ranks), "flex")
    built: nn.Module = model.train()
    return built


def shard(batch: Mapping[str, Tensor], problem: CaseProblem) -> Part:
    from torchtitan.models.attention import create_attention_mask, get_causal_mask_mod

    length = batch["input_ids"].shape[1]
    with mask_blocks(batch, problem):
        masks = create_attention_mask(get_causal_mask_mod(), 1, None, length, length, device="cpu")
        return part_of(batch, {"attention_masks": masks}, problem)


def step(model: nn.Module, parts: Sequence[Part], problem: CaseProblem) -> Tensor:
    return step_of(loss_of, model, parts, problem)


def gather(model: nn.Module, problem: CaseProblem) -> dict[str, Tensor]:
    own = {name: each.grad for name, each in model.named_parameters()}
    found = {name: own[_own_name(name)] for name in problem.state}
    return {name: _reordered(name, each, problem, (-1, 2)) for name, each in found.items() if each is not None}


def evaluate(model: nn.Module, part: Part, problem: CaseProblem) -> Tensor:
    return evaluation_of(loss_of, model, part, problem)
